UPDATE cluster SET key_asked_at = clock_timestamp(), key_asked_by = $2, version = version + 1 WHERE cluster_id = $1
