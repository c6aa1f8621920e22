-- An epoch that nobody of the cluster ever spoke of. One that says a number far beyond it says nothing true, and would use
-- them up; it is left to itself.
UPDATE cluster SET epoch = 1 + GREATEST(epoch,
    (SELECT COALESCE(max(r.epoch), 0) FROM machine_cluster_report r JOIN machine_cluster c ON c.machine_id = r.machine_id
     WHERE c.cluster_id = $1 AND r.epoch <= cluster.epoch + $2),
    (SELECT COALESCE(max(s.epoch), 0) FROM cluster_snapshot s WHERE s.cluster_id = $1))
WHERE cluster_id = $1 AND restoring_since IS NOT NULL
RETURNING epoch
