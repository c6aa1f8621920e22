-- Measure how work ended within a period, and how long it took, from the newest history rows up to a bound.
-- If that bound is reached, the result covers the time since the oldest of these rows, and not the whole
-- period.
WITH recent_history AS MATERIALIZED (
    SELECT h.machine_id, h.at, h.event, h.edge, h.lane, h.fence, h.process
    FROM history h
    WHERE h.at > clock_timestamp() - $1 * INTERVAL '1 millisecond'
    ORDER BY h.at DESC
    LIMIT $2),
covered_time AS (
    SELECT CASE WHEN count(*) < $2 THEN $1::FLOAT8 / 1000
                ELSE EXTRACT(EPOCH FROM clock_timestamp() - min(at))::FLOAT8 END AS seconds
    FROM recent_history)
SELECT e.process AS "process!", e.event AS "event!", count(*) AS "count!",
       (sum(EXTRACT(EPOCH FROM e.at - b.at)))::FLOAT8 AS "took_seconds",
       max(covered_time.seconds) AS "covered_seconds!"
FROM recent_history e
CROSS JOIN covered_time
LEFT JOIN history b ON b.machine_id = e.machine_id AND b.lane = e.lane AND b.fence = e.fence AND b.edge = 'start'
WHERE e.edge = 'end'
  AND (cardinality($3::TEXT[]) = 0
       OR EXISTS (SELECT 1 FROM machine_provided p WHERE p.machine_id = e.machine_id AND p.provider = ANY($3)))
GROUP BY e.process, e.event
ORDER BY e.process, e.event
