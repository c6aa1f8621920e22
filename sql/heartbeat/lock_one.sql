-- Lock the heartbeat row of a machine that is about to be found silent. This keeps its heartbeats out first,
-- and the caller then reads the facts again.
SELECT machine_id FROM machine_agent_heartbeat WHERE machine_id = $1 FOR NO KEY UPDATE
