UPDATE cluster_former_key SET removed_at = clock_timestamp()
WHERE cluster_id = $1 AND public_key = $2 AND removed_at IS NULL
