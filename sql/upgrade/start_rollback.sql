-- Roll an upgrade back from where it is. No node has been ordered in that direction yet.
UPDATE cluster_upgrade SET back = TRUE, paused = NULL, requested_nodes = '{}' WHERE upgrade_id = $1 AND ended_at IS NULL
