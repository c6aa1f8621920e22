-- Delete pieces of artefacts whose upload was not completed within the time limit. A piece is large, so a
-- batch is small.
DELETE FROM artefact_chunk c
WHERE (c.sha256, c.number) IN (
    SELECT o.sha256, o.number FROM artefact_chunk o
    JOIN artefact a ON a.sha256 = o.sha256
    WHERE a.added_at IS NULL AND a.begun_at < now() - $1::INT8 * INTERVAL '1 millisecond'
    LIMIT $2)
