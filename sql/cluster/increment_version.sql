-- Increment the version of a cluster whose desired state has changed outside its row.
UPDATE cluster SET settled = FALSE, version = version + 1 WHERE cluster_id = $1
