-- Find the image of etcd with this digest, for the machine that is ordered to restore its cluster from exactly the snapshot
-- that the image belongs to, and with the image. The sealed order decides whether the machine gets it.
SELECT i.image_id, i.cluster_id, i.snapshot_id, i.parts AS "parts!", i.bytes AS "bytes!", o.sealed AS "sealed_order!"
FROM cluster_image i
JOIN cluster k ON k.cluster_id = i.cluster_id AND k.restoring_from = i.snapshot_id AND k.restoring_with_image
JOIN machine_cluster c ON c.cluster_id = k.cluster_id
JOIN cluster_order o ON o.machine_id = c.machine_id
WHERE c.machine_id = $1 AND i.digest = $2 AND i.completed_at IS NOT NULL AND c.part = 'control-plane'
  AND c.leaving IS NULL AND o.what = 'found' AND o.sealed IS NOT NULL AND o.ordered_at > k.restoring_since
LIMIT 1
