UPDATE cluster_upgrade SET ended_at = clock_timestamp(), ended = $2 WHERE upgrade_id = $1 AND ended_at IS NULL
RETURNING upgrade_id
