-- Beyond whatever was claimed after the backup was taken. Pauses after losses are of another time too.
UPDATE machine_due SET fence = fence + $2, losses = 0, not_before = NULL WHERE machine_id = ANY ($1)
RETURNING machine_id
