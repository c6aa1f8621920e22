INSERT INTO machine (machine_id, created_at) VALUES ($1, clock_timestamp())
