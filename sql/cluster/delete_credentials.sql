-- Of a cluster that is about to go.
DELETE FROM cluster_credential WHERE cluster_id = $1
