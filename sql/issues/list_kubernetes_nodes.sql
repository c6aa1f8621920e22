-- List what the nodes of clusters run of Kubernetes, as they last reported, and what their curators last
-- reported about all of it.
SELECT c.name, k.observed, m.node_id AS "node_id?", m.kubernetes AS "kubernetes?",
       COALESCE(p.provider_id, m.machine_id::TEXT) AS machine
FROM cluster c
JOIN cluster_kubernetes k ON k.cluster_id = c.cluster_id
LEFT JOIN machine_cluster m ON m.cluster_id = c.cluster_id AND m.leaving IS NULL
LEFT JOIN machine_provided p ON p.machine_id = m.machine_id
WHERE c.founded_at IS NOT NULL AND c.deleting_at IS NULL
ORDER BY c.name, 5
