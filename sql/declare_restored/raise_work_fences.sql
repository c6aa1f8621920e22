-- Raise the fences of due rows beyond anything that was claimed after the backup was taken. The pauses after
-- losses are cleared, because they are of another time too.
UPDATE machine_due SET fence = fence + $2, losses = 0, not_before = NULL WHERE machine_id = ANY ($1)
RETURNING machine_id
