-- It goes back from where it is; nobody was asked on that way yet.
UPDATE cluster_upgrade SET back = TRUE, paused = NULL, asked = '{}' WHERE upgrade_id = $1 AND ended_at IS NULL
