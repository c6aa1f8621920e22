UPDATE roll_out_machine SET state = 'ordered', generation = $3, message = NULL, changed_at = clock_timestamp()
WHERE roll_out_id = $1 AND machine_id = $2 AND state = 'waiting' AND active
RETURNING generation
