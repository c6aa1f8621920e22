UPDATE cluster SET keys_refused_since = CASE WHEN $2::BOOL THEN COALESCE(keys_refused_since, clock_timestamp()) END
WHERE cluster_id = $1
