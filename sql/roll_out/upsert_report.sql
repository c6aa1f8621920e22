-- Record what release an agent reports, and what it finds wrong with how it runs. `reported_at` is when it first
-- reported this release. `updated_to` is the release that the machine was updated to by an order. It stays until the
-- machine was updated to another one.
INSERT INTO machine_release_report AS r (machine_id, generation, sha256, error, reported_at, updated_to, findings)
SELECT $1::UUID, $2::INT8, $3::BYTEA, $4::TEXT, clock_timestamp(),
       CASE WHEN $4 IS NULL AND EXISTS (
           SELECT 1 FROM release_order WHERE machine_id = $1 AND generation = $2 AND sha256 = $3) THEN $3 END,
       $5::JSONB
ON CONFLICT (machine_id) DO UPDATE
SET generation = EXCLUDED.generation, sha256 = EXCLUDED.sha256, error = EXCLUDED.error,
    reported_at = CASE WHEN (r.generation, r.sha256, r.error)
                           IS DISTINCT FROM (EXCLUDED.generation, EXCLUDED.sha256, EXCLUDED.error)
                       THEN EXCLUDED.reported_at ELSE r.reported_at END,
    updated_to = COALESCE(EXCLUDED.updated_to, r.updated_to), findings = EXCLUDED.findings
WHERE (r.generation, r.sha256, r.error, r.findings)
    IS DISTINCT FROM (EXCLUDED.generation, EXCLUDED.sha256, EXCLUDED.error, EXCLUDED.findings)
