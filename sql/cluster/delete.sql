DELETE FROM cluster WHERE cluster_id = $1 AND deleting_at IS NOT NULL RETURNING cluster_id
