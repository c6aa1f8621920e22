DELETE FROM machine_priority WHERE machine_id = $1
