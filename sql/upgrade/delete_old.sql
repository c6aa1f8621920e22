-- Delete the upgrades of a cluster that have ended, except the newest ones.
DELETE FROM cluster_upgrade WHERE cluster_id = $1 AND ended_at IS NOT NULL AND upgrade_id NOT IN
    (SELECT upgrade_id FROM cluster_upgrade WHERE cluster_id = $1 ORDER BY created_at DESC LIMIT $2)
