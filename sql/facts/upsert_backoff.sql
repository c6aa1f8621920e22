INSERT INTO work_backoff (machine_id, process, failures, last_interval_ms, until, cause)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (machine_id, process) DO UPDATE
SET failures = EXCLUDED.failures, last_interval_ms = EXCLUDED.last_interval_ms, until = EXCLUDED.until,
    cause = EXCLUDED.cause
