UPDATE cluster_upgrade SET paused = $2 WHERE upgrade_id = $1 AND ended_at IS NULL
