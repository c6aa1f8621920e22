INSERT INTO machine_key_replacement (machine_id, keys, reason, ordered_by, ordered_at, expires_at)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (machine_id) DO UPDATE
SET keys = EXCLUDED.keys, reason = EXCLUDED.reason, ordered_by = EXCLUDED.ordered_by,
    ordered_at = EXCLUDED.ordered_at, expires_at = EXCLUDED.expires_at
