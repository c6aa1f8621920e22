INSERT INTO machine_retirement (machine_id, reason, requested_by, requested_at, wipe)
VALUES ($1, $2, $3, clock_timestamp(), $4)
ON CONFLICT (machine_id) DO NOTHING
