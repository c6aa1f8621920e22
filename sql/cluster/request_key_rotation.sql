UPDATE cluster SET key_rotation_requested_at = clock_timestamp(), key_rotation_requested_by = $2,
    version = version + 1
WHERE cluster_id = $1
