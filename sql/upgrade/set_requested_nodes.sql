-- Set which nodes were ordered to upgrade, and which of them are done.
UPDATE cluster_upgrade SET requested_nodes = $2 WHERE upgrade_id = $1 AND ended_at IS NULL
