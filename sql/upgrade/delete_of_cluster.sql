-- Of a cluster that is about to go.
DELETE FROM cluster_upgrade WHERE cluster_id = $1
