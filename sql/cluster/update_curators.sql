UPDATE cluster SET curators = $2, epoch = GREATEST(epoch, $3)
WHERE cluster_id = $1 AND (curators IS DISTINCT FROM $2 OR epoch < $3)
