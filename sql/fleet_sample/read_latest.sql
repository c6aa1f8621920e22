-- Read the time and the newest sample, with its counts only if it is newer than the one of minute $1.
SELECT clock_timestamp() AS "now!", s.minute AS "minute?", s.taken_at AS "taken_at?",
       CASE WHEN $1::TIMESTAMPTZ IS NULL OR s.minute > $1 THEN s.counts END AS "counts?"
FROM (SELECT 1) AS one
LEFT JOIN (SELECT minute, taken_at, counts FROM fleet_sample ORDER BY minute DESC LIMIT 1) s ON TRUE
