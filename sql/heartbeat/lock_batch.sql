-- Lock the heartbeat rows of a batch, in the order of machines. A row that another transaction has locked is
-- skipped, so that it does not delay all the others.
SELECT machine_id FROM machine_agent_heartbeat
WHERE machine_id = ANY ($1)
ORDER BY machine_id
FOR NO KEY UPDATE SKIP LOCKED
