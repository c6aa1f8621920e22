-- What is to be replaced, as long as no curator was told.
UPDATE cluster_kubernetes SET rotate = $2 WHERE cluster_id = $1
