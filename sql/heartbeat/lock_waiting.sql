-- As lock.sql, for a database that cannot skip locked rows.
SELECT machine_id FROM machine_agent_heartbeat
WHERE machine_id = ANY ($1)
ORDER BY machine_id
FOR NO KEY UPDATE
