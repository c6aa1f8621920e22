-- Which nodes were asked, and which of them are through.
UPDATE cluster_upgrade SET asked = $2 WHERE upgrade_id = $1 AND ended_at IS NULL
