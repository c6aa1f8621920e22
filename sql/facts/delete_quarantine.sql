DELETE FROM machine_quarantine WHERE machine_id = $1
