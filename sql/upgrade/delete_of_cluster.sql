-- Delete the upgrades of a cluster that is about to be deleted.
DELETE FROM cluster_upgrade WHERE cluster_id = $1
