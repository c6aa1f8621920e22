DELETE FROM cluster_snapshot_chunk WHERE snapshot_id = ANY($1)
