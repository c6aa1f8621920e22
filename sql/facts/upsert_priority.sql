INSERT INTO machine_priority (machine_id, level, reason, set_by, since, until)
VALUES ($1, $2, $3, $4, clock_timestamp(), $5)
ON CONFLICT (machine_id) DO UPDATE
SET level = EXCLUDED.level, reason = EXCLUDED.reason, set_by = EXCLUDED.set_by, since = EXCLUDED.since,
    until = EXCLUDED.until
