-- The lease goes back. Losses and the pause after them are forgotten: somebody got through.
UPDATE machine_due
SET lease_session = NULL, losses = 0, not_before = NULL
WHERE machine_id = $1 AND lane = $2 AND lease_session = $3 AND fence = $4
RETURNING machine_id
