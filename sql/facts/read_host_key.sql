SELECT algorithm, public_key, source, pinned_at, refused_algorithm, refused_key, refused_at
FROM machine_ssh_host_key WHERE machine_id = $1
