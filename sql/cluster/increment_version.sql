-- What a cluster is to be has changed elsewhere than in its row.
UPDATE cluster SET settled = FALSE, version = version + 1 WHERE cluster_id = $1
