INSERT INTO machine_quarantine (machine_id, since, reason) VALUES ($1, clock_timestamp(), $2)
ON CONFLICT (machine_id) DO UPDATE SET reason = EXCLUDED.reason
