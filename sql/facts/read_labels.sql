SELECT labels FROM machine_labels WHERE machine_id = $1
