UPDATE roll_out_machine SET state = $3, message = $4, changed_at = clock_timestamp()
WHERE roll_out_id = $1 AND machine_id = $2 AND state <> $3 AND active
RETURNING state
