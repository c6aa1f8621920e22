-- Pieces of files that nobody brought to their end within the time; a piece is large, so few at a time.
DELETE FROM artefact_chunk c
WHERE (c.sha256, c.number) IN (
    SELECT o.sha256, o.number FROM artefact_chunk o
    JOIN artefact a ON a.sha256 = o.sha256
    WHERE a.added_at IS NULL AND a.begun_at < now() - $1::INT8 * INTERVAL '1 millisecond'
    LIMIT $2)
