-- Delete images that were abandoned, that were not completed within the time limit, or whose snapshot is not retained any
-- more, once all their parts are deleted.
DELETE FROM cluster_image i
WHERE (i.abandoned
       OR (i.completed_at IS NULL AND i.begun_at < now() - $1::INT8 * INTERVAL '1 millisecond')
       OR NOT EXISTS (SELECT 1 FROM cluster_snapshot s WHERE s.snapshot_id = i.snapshot_id))
  AND NOT EXISTS (SELECT 1 FROM cluster_image_part p WHERE p.image_id = i.image_id)
