INSERT INTO history (machine_id, at, event, detail) VALUES ($1, clock_timestamp(), $2, $3)
