-- Of a cluster that is about to go.
DELETE FROM cluster_kubernetes_user WHERE cluster_id = $1
