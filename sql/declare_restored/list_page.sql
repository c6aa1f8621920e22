SELECT machine_id FROM machine WHERE machine_id > $1 ORDER BY machine_id LIMIT $2
