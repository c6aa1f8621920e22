INSERT INTO artefact (sha256, size, upload, begun_at) VALUES ($1, $2, $3, clock_timestamp())
ON CONFLICT (sha256) DO NOTHING
