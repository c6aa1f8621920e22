-- List the snapshots of a cluster, newest first, each with the size of its image of etcd if that is complete.
SELECT s.snapshot_id, s.taken_at, s.why, s.revision, s.epoch, s.bytes, s.nodes, s.members, s.digest,
       i.bytes AS "image_bytes?"
FROM cluster_snapshot s
LEFT JOIN cluster_image i ON i.snapshot_id = s.snapshot_id AND i.completed_at IS NOT NULL
WHERE s.cluster_id = $1
ORDER BY s.taken_at DESC, s.snapshot_id
