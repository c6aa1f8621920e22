-- List the snapshots of a cluster, newest first.
SELECT snapshot_id, taken_at, why, revision, epoch, bytes, nodes, members, digest
FROM cluster_snapshot WHERE cluster_id = $1
ORDER BY taken_at DESC, snapshot_id
