-- Lock a cluster, so that no restore is ordered meanwhile, and read the snapshot that it is being restored
-- from.
SELECT restoring_from FROM cluster WHERE cluster_id = $1 FOR UPDATE
