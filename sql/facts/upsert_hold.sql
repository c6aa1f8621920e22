INSERT INTO machine_hold (machine_id, scope, reason, held_by, held_at, until)
VALUES ($1, $2, $3, $4, clock_timestamp(), $5)
ON CONFLICT (machine_id) DO UPDATE
SET scope = EXCLUDED.scope, reason = EXCLUDED.reason, held_by = EXCLUDED.held_by, held_at = EXCLUDED.held_at,
    until = EXCLUDED.until
