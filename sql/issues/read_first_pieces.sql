-- Read the first piece of each of these artefacts, as far as it is stored.
SELECT c.sha256, c.bytes
FROM artefact_chunk c
JOIN artefact a ON a.sha256 = c.sha256 AND a.added_at IS NOT NULL
WHERE c.number = 0 AND c.sha256 = ANY ($1::BYTEA[])
