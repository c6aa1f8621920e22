DELETE FROM machine_hold WHERE machine_id = $1
