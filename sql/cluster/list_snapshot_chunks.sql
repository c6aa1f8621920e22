-- List the sealed chunks of a snapshot, in order.
SELECT sealed FROM cluster_snapshot_chunk WHERE snapshot_id = $1 ORDER BY number
