-- Where something happened from one moment to another. A line of history is dated when it is written and
-- seen when that commits, so whoever follows looks again at the seconds before.
SELECT h.machine_id, h.at FROM history h
WHERE h.at > $1 AND h.at <= $2
ORDER BY h.at
LIMIT $3
