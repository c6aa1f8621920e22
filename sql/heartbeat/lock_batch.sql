-- The rows of a group, in the order of machines. One that somebody has locked is skipped, so that it
-- does not hold up all the others.
SELECT machine_id FROM machine_agent_heartbeat
WHERE machine_id = ANY ($1)
ORDER BY machine_id
FOR NO KEY UPDATE SKIP LOCKED
