UPDATE cluster_kubernetes SET known = $2 WHERE cluster_id = $1 AND known IS DISTINCT FROM $2
