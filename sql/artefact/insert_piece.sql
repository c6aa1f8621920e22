-- Insert a piece of an artefact whose upload is not complete.
INSERT INTO artefact_chunk (sha256, number, bytes)
SELECT a.sha256, $2, $3 FROM artefact a WHERE a.sha256 = $1 AND a.added_at IS NULL
ON CONFLICT (sha256, number) DO NOTHING
