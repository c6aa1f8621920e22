UPDATE machine_provided
SET reservation = $2, address = $3, ssh_port = $4, ssh_user = $5, location = $6, status = $7,
    unchanged = $8, looked_at = clock_timestamp()
WHERE machine_id = $1
