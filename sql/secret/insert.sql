-- Insert a sealed secret, unless one with this name exists: the first writer wins.
INSERT INTO sealed_secret (name, sealed, created_at) VALUES ($1, $2, clock_timestamp())
ON CONFLICT (name) DO NOTHING
