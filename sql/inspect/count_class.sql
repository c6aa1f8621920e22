-- Count the machines of one (phase, provider), up to a bound. The order is that of their index, so that they
-- are counted in it.
SELECT count(*) AS "count!" FROM (
    SELECT 1 FROM machine_due d
    WHERE d.lane = 'access' AND d.phase_index = $1 AND d.provider = $2
    ORDER BY d.machine_id
    LIMIT $3) c
