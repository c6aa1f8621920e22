UPDATE cluster_kubernetes SET removing_by = $2, rotate = '[]' WHERE cluster_id = $1 AND removing_by IS NULL
