-- Delete parts of images that were abandoned, that were not completed within the time limit, or whose snapshot is not
-- retained any more. A part is large, so a batch is small.
DELETE FROM cluster_image_part p
WHERE (p.image_id, p.number) IN (
    SELECT o.image_id, o.number FROM cluster_image_part o
    JOIN cluster_image i ON i.image_id = o.image_id
    WHERE i.abandoned
       OR (i.completed_at IS NULL AND i.begun_at < now() - $1::INT8 * INTERVAL '1 millisecond')
       OR NOT EXISTS (SELECT 1 FROM cluster_snapshot s WHERE s.snapshot_id = i.snapshot_id)
    LIMIT $2)
