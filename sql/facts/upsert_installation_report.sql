INSERT INTO machine_os_installation_report (machine_id, generation, succeeded, error, reported_at)
VALUES ($1, $2, $3, $4, clock_timestamp())
ON CONFLICT (machine_id) DO UPDATE
SET generation = EXCLUDED.generation, succeeded = EXCLUDED.succeeded, error = EXCLUDED.error,
    reported_at = EXCLUDED.reported_at
