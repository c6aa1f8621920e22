DELETE FROM machine_agent_started WHERE machine_id = $1
