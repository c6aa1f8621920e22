UPDATE roll_out SET paused = $2 WHERE roll_out_id = $1 AND ended_at IS NULL
