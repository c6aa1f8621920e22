-- Files that nobody brought to their end within the time, once none of their pieces is left.
DELETE FROM artefact a
WHERE a.added_at IS NULL AND a.begun_at < now() - $1::INT8 * INTERVAL '1 millisecond'
  AND NOT EXISTS (SELECT 1 FROM artefact_chunk c WHERE c.sha256 = a.sha256)
