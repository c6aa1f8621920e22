-- Find the snapshot with this digest, for the machine that is ordered to restore its cluster from exactly
-- this one. The sealed order decides whether the machine gets it.
SELECT s.snapshot_id, o.sealed AS "sealed_order!"
FROM cluster_snapshot s
JOIN cluster k ON k.cluster_id = s.cluster_id AND k.restoring_from = s.snapshot_id
JOIN machine_cluster c ON c.cluster_id = k.cluster_id
JOIN cluster_order o ON o.machine_id = c.machine_id
WHERE c.machine_id = $1 AND s.digest = $2 AND c.part = 'control-plane' AND c.leaving IS NULL
  AND o.what = 'found' AND o.sealed IS NOT NULL AND o.ordered_at > k.restoring_since
LIMIT 1
