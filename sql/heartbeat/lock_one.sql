-- Whoever is about to find a machine silent keeps its heartbeats out first, and then reads again.
SELECT machine_id FROM machine_agent_heartbeat WHERE machine_id = $1 FOR NO KEY UPDATE
