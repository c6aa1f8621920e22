-- Set the desired bundle of a cluster to the one that all of its nodes run by now.
UPDATE cluster_kubernetes SET bundle = $2, version = $3 WHERE cluster_id = $1
