UPDATE cluster SET snapshot_requested_at = clock_timestamp(), version = version + 1 WHERE cluster_id = $1
