UPDATE cluster_upgrade SET released = TRUE WHERE upgrade_id = $1 AND ended_at IS NULL
