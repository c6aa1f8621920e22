SELECT roll_out_id FROM roll_out WHERE ended_at IS NULL ORDER BY created_at, roll_out_id
