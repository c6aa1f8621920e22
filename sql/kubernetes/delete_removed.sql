DELETE FROM cluster_kubernetes WHERE cluster_id = $1 AND removing_by IS NOT NULL
