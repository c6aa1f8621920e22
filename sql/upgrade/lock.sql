SELECT paused, ended, asked FROM cluster_upgrade WHERE upgrade_id = $1 FOR UPDATE
