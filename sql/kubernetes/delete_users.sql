-- Delete the Kubernetes users of a cluster that is about to be deleted.
DELETE FROM cluster_kubernetes_user WHERE cluster_id = $1
