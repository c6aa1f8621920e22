INSERT INTO provider_state (provider, kind, listed_at, machines) VALUES ($1, $2, clock_timestamp(), $3)
ON CONFLICT (provider) DO UPDATE
SET kind = EXCLUDED.kind, listed_at = EXCLUDED.listed_at, machines = EXCLUDED.machines, error = NULL,
    error_at = NULL
