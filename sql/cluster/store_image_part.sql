-- Store a part of an image that is being taken. A part that is stored already, because the answer was lost, is replaced by
-- the same one, sealed again.
INSERT INTO cluster_image_part (image_id, number, sealed)
SELECT i.image_id, $2, $3 FROM cluster_image i
WHERE i.image_id = $1 AND i.completed_at IS NULL AND NOT i.abandoned
ON CONFLICT (image_id, number) DO UPDATE SET sealed = EXCLUDED.sealed
