DELETE FROM machine_agent_heartbeat WHERE machine_id = $1
