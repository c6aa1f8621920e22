DELETE FROM cluster_former_key WHERE cluster_id = $1 AND public_key = $2 AND removed_at IS NOT NULL RETURNING cluster_id
