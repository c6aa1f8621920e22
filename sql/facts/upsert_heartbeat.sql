INSERT INTO machine_agent_heartbeat AS h (machine_id, at, boot_id, incarnation, sequence, version)
VALUES ($1, clock_timestamp(), $2, $3, $4, $5)
ON CONFLICT (machine_id) DO UPDATE
SET at = EXCLUDED.at, boot_id = EXCLUDED.boot_id, incarnation = EXCLUDED.incarnation,
    sequence = EXCLUDED.sequence, version = EXCLUDED.version,
    previous_boot_id = CASE WHEN h.boot_id = EXCLUDED.boot_id THEN h.previous_boot_id ELSE h.boot_id END
