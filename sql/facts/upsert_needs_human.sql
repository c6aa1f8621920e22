INSERT INTO machine_needs_human (machine_id, since, obstacle, reason) VALUES ($1, clock_timestamp(), $2, $3)
ON CONFLICT (machine_id) DO UPDATE
SET obstacle = EXCLUDED.obstacle, reason = EXCLUDED.reason, reporting_since = NULL
