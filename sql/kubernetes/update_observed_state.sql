UPDATE cluster_kubernetes SET observed = $2 WHERE cluster_id = $1 AND observed IS DISTINCT FROM $2
