INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence, version)
VALUES ($1, clock_timestamp(), $2, $3, $4, $5)
ON CONFLICT (machine_id) DO UPDATE
SET at = EXCLUDED.at, boot_id = EXCLUDED.boot_id, incarnation = EXCLUDED.incarnation,
    sequence = EXCLUDED.sequence, version = EXCLUDED.version
