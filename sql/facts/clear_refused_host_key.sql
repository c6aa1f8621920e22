UPDATE machine_ssh_host_key
SET refused_algorithm = NULL, refused_key = NULL, refused_at = NULL
WHERE machine_id = $1
