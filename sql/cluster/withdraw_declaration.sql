UPDATE cluster_declaration SET withdrawn_at = clock_timestamp()
WHERE cluster_id = $1 AND role = $2 AND withdrawn_at IS NULL
RETURNING role
