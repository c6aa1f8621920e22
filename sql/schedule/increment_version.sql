UPDATE machine_due SET version = version + 1 WHERE machine_id = $1 AND lane = 'access'
