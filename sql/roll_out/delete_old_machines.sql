-- Delete the machines of roll-outs that have ended, except those of the newest.
DELETE FROM roll_out_machine WHERE roll_out_id IN (
    SELECT roll_out_id FROM roll_out WHERE ended_at IS NOT NULL ORDER BY ended_at DESC, roll_out_id OFFSET $1)
