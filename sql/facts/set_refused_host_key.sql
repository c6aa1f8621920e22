UPDATE machine_ssh_host_key
SET refused_algorithm = $2, refused_key = $3, refused_at = clock_timestamp()
WHERE machine_id = $1
