-- Delete the Kubernetes of a cluster that is about to be deleted.
DELETE FROM cluster_kubernetes WHERE cluster_id = $1
