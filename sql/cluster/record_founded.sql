UPDATE cluster SET founded_at = clock_timestamp(), ca_certificate = $2, curators = $3
WHERE cluster_id = $1 AND founded_at IS NULL
RETURNING cluster_id
