-- What its agent said; `reported_at` is when that was first so.
INSERT INTO machine_release_report AS r (machine_id, generation, sha256, error, reported_at)
VALUES ($1, $2, $3, $4, clock_timestamp())
ON CONFLICT (machine_id) DO UPDATE
SET generation = EXCLUDED.generation, sha256 = EXCLUDED.sha256, error = EXCLUDED.error,
    reported_at = EXCLUDED.reported_at
WHERE (r.generation, r.sha256, r.error) IS DISTINCT FROM (EXCLUDED.generation, EXCLUDED.sha256, EXCLUDED.error)
