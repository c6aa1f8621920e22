DELETE FROM cluster_snapshot WHERE snapshot_id = ANY($1)
