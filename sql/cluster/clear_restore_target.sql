-- Clear the restore target of a cluster when that machine is lost, so that any machine may restore the
-- cluster. This applies only to a machine that was chosen after the restore began, that is, for the restore.
UPDATE cluster c SET restoring_onto = NULL
WHERE c.cluster_id = $2 AND c.restoring_onto = $1
  AND EXISTS (SELECT 1 FROM machine_cluster m
              WHERE m.machine_id = $1 AND m.cluster_id = $2 AND m.chosen_at > c.restoring_since)
