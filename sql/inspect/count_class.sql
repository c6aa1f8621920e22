-- Machines of one (phase, provider), up to a bound.
SELECT count(*) AS "count!" FROM (
    SELECT 1 FROM machine_due d
    WHERE d.lane = 'access' AND d.phase_index = $1 AND d.provider = $2
    LIMIT $3) c
