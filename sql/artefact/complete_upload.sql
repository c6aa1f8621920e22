-- Add an artefact whose pieces are all there and have its digest.
UPDATE artefact
SET name = $3, added_at = clock_timestamp(), added_by = $4, kubernetes = $5, signature = $6
WHERE sha256 = $1 AND upload = $2 AND added_at IS NULL
RETURNING added_at
