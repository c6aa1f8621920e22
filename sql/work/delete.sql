DELETE FROM work WHERE machine_id = $1 AND lane = $2 AND session_id = $3 AND fence = $4
RETURNING machine_id
