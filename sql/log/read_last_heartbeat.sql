SELECT (SELECT h.at FROM machine_agent_heartbeat h WHERE h.machine_id = $1) AS "last_heartbeat_at?"
