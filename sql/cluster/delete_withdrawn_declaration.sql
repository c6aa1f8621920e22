DELETE FROM cluster_declaration WHERE cluster_id = $1 AND role = $2 AND withdrawn_at IS NOT NULL
