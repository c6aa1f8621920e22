DELETE FROM machine_recovery WHERE machine_id = $1
