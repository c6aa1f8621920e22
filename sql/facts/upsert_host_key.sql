INSERT INTO machine_ssh_host_key (machine_id, algorithm, public_key, source, pinned_at)
VALUES ($1, $2, $3, $4, clock_timestamp())
ON CONFLICT (machine_id) DO UPDATE
SET algorithm = EXCLUDED.algorithm, public_key = EXCLUDED.public_key, source = EXCLUDED.source,
    pinned_at = EXCLUDED.pinned_at, refused_algorithm = NULL, refused_key = NULL, refused_at = NULL
