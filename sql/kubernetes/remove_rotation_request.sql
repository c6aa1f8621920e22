-- Its curators were told.
UPDATE cluster_kubernetes SET rotate = rotate - $2::TEXT WHERE cluster_id = $1
