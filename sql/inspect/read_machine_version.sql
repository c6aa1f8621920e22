SELECT version FROM machine_due WHERE machine_id = $1 AND lane = 'access'
