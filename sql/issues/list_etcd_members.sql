-- List the control planes of clusters that were founded and are not being deleted, with the version of etcd that each machine
-- last reported.
SELECT m.cluster_id, r.etcd_version AS "etcd_version!", COALESCE(p.provider_id, m.machine_id::TEXT) AS "machine!"
FROM cluster c
JOIN machine_cluster m ON m.cluster_id = c.cluster_id AND m.part = 'control-plane' AND m.leaving IS NULL
JOIN machine_cluster_report r ON r.machine_id = m.machine_id AND r.etcd_version IS NOT NULL
LEFT JOIN machine_provided p ON p.machine_id = m.machine_id
WHERE c.founded_at IS NOT NULL AND c.deleting_at IS NULL
ORDER BY m.cluster_id, 3
