INSERT INTO release_order (machine_id, generation, sha256, deadline_seconds, ordered_at, withdrawn)
VALUES ($1, $2, $3, $4, clock_timestamp(), FALSE)
ON CONFLICT (machine_id) DO UPDATE
SET generation = EXCLUDED.generation, sha256 = EXCLUDED.sha256, deadline_seconds = EXCLUDED.deadline_seconds,
    ordered_at = EXCLUDED.ordered_at, withdrawn = FALSE
