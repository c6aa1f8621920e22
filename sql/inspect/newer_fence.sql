-- The highest fence that a machine's agent was heard to know, while this database has given none as
-- high. Declaring a restored backup raises the fences beyond it.
SELECT h.at, h.fence AS "fence!"
FROM history h
WHERE h.machine_id = $1 AND h.event = 'NewerFence'
  AND h.fence > (SELECT max(d.fence) FROM machine_due d WHERE d.machine_id = $1 AND d.lane = 'access')
ORDER BY h.fence DESC
LIMIT 1
