-- Delete artefacts whose upload was not completed within the time limit, once all of their pieces are
-- deleted.
DELETE FROM artefact a
WHERE a.added_at IS NULL AND a.begun_at < now() - $1::INT8 * INTERVAL '1 millisecond'
  AND NOT EXISTS (SELECT 1 FROM artefact_chunk c WHERE c.sha256 = a.sha256)
