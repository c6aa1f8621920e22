SELECT paused, ended, requested_nodes FROM cluster_upgrade WHERE upgrade_id = $1 FOR UPDATE
