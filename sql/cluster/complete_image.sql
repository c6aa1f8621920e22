-- Complete an image whose parts are all stored, if nothing abandoned it and its snapshot is still retained.
UPDATE cluster_image i
SET completed_at = clock_timestamp(), parts = $2, bytes = $3, digest = $4, revision = $5, etcd_version = $6
WHERE i.image_id = $1 AND i.completed_at IS NULL AND NOT i.abandoned
  AND (SELECT count(*) FROM cluster_image_part p WHERE p.image_id = $1 AND p.number < $2) = $2
  AND EXISTS (SELECT 1 FROM cluster_snapshot s WHERE s.snapshot_id = i.snapshot_id)
