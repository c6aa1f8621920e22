INSERT INTO machine_agent_started AS a (machine_id, started_at, public_key, boot_id, version, supervision, fence)
VALUES ($1, clock_timestamp(), $2, $3, $4, $5, $6)
ON CONFLICT (machine_id) DO UPDATE
SET started_at = EXCLUDED.started_at, public_key = EXCLUDED.public_key, boot_id = EXCLUDED.boot_id,
    version = EXCLUDED.version, supervision = EXCLUDED.supervision, fence = EXCLUDED.fence
