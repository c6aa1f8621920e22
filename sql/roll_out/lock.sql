SELECT paused, ended FROM roll_out WHERE roll_out_id = $1 FOR UPDATE
