INSERT INTO provider_state (provider, kind, error, error_at) VALUES ($1, $2, $3, clock_timestamp())
ON CONFLICT (provider) DO UPDATE
SET kind = EXCLUDED.kind, error = EXCLUDED.error, error_at = EXCLUDED.error_at
