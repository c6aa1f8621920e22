-- Read the cluster membership of a machine, for display to operators.
SELECT k.name, c.part, c.leaving, c.wait_reason, c.health, c.kubernetes
FROM machine_cluster c JOIN cluster k ON k.cluster_id = c.cluster_id
WHERE c.machine_id = $1
