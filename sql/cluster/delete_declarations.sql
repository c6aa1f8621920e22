-- Of a cluster that is about to go.
DELETE FROM cluster_declaration WHERE cluster_id = $1
