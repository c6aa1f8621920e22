-- Insert a sealed secret, or replace the one with this name, which was never used.
INSERT INTO sealed_secret (name, sealed, created_at) VALUES ($1, $2, clock_timestamp())
ON CONFLICT (name) DO UPDATE SET sealed = excluded.sealed, created_at = excluded.created_at
