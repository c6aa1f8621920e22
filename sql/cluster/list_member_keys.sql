-- List the node keys of the machines of a cluster, with the provider ids by which operators know the
-- machines.
SELECT c.machine_id, p.provider_id AS "provider_id?", c.approved, r.node_key AS "node_key?"
FROM machine_cluster c
LEFT JOIN machine_provided p ON p.machine_id = c.machine_id
LEFT JOIN machine_cluster_report r ON r.machine_id = c.machine_id
WHERE c.cluster_id = $1
