INSERT INTO machine_needs_human (machine_id, since, reason) VALUES ($1, clock_timestamp(), $2)
ON CONFLICT (machine_id) DO UPDATE SET reason = EXCLUDED.reason
