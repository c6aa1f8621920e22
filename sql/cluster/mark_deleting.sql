UPDATE cluster SET deleting_at = clock_timestamp(), deleting_by = $2, version = version + 1
WHERE cluster_id = $1
