-- What a snapshot is, sealed, in its order.
SELECT sealed FROM cluster_snapshot_chunk WHERE snapshot_id = $1 ORDER BY number
