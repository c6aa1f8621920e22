UPDATE cluster SET control_plane = $2, workers = $3, roles = $4, settled = FALSE, version = version + 1
WHERE cluster_id = $1
