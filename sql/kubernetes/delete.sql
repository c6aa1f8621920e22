-- Of a cluster that is about to go.
DELETE FROM cluster_kubernetes WHERE cluster_id = $1
