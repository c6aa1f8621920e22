DELETE FROM machine_needs_human WHERE machine_id = $1
