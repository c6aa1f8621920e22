DELETE FROM machine_labels WHERE machine_id = $1
