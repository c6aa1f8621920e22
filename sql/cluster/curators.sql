UPDATE cluster SET curators = $2 WHERE cluster_id = $1 AND curators IS DISTINCT FROM $2
