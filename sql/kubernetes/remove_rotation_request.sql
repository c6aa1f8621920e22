-- Remove a rotation request that the cluster's curators have received.
UPDATE cluster_kubernetes SET rotate = rotate - $2::TEXT WHERE cluster_id = $1
