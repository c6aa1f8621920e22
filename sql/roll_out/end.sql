UPDATE roll_out SET ended_at = clock_timestamp(), ended = $2 WHERE roll_out_id = $1 AND ended_at IS NULL
