-- Allocate an epoch that no node and no snapshot of the cluster has ever had. A reported epoch far beyond the
-- cluster's own (by more than $2) is false and would exhaust the numbers, so it is ignored.
UPDATE cluster SET epoch = 1 + GREATEST(epoch,
    (SELECT COALESCE(max(r.epoch), 0) FROM machine_cluster_report r JOIN machine_cluster c ON c.machine_id = r.machine_id
     WHERE c.cluster_id = $1 AND r.epoch <= cluster.epoch + $2),
    (SELECT COALESCE(max(s.epoch), 0) FROM cluster_snapshot s WHERE s.cluster_id = $1))
WHERE cluster_id = $1 AND restoring_since IS NOT NULL
RETURNING epoch
