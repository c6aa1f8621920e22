-- The machine that was to restore it was chosen for that, and is lost: from now on any machine may.
UPDATE cluster c SET restoring_onto = NULL
WHERE c.cluster_id = $2 AND c.restoring_onto = $1
  AND EXISTS (SELECT 1 FROM machine_cluster m
              WHERE m.machine_id = $1 AND m.cluster_id = $2 AND m.chosen_at > c.restoring_since)
