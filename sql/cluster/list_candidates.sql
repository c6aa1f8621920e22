-- List a page of machines that are healthy, in no cluster, and not planned for anything else (retirement,
-- quarantine, hold).
SELECT d.machine_id, p.provider, p.provider_id, p.location, h.manufacturer AS "manufacturer?", h.product AS "product?",
       h.memory_bytes AS "memory_bytes?", h.cpu_threads AS "cpu_threads?", l.labels AS "labels?",
       v.etcd_version AS "etcd_version?", v.etcdutl_version AS "etcdutl_version?"
FROM machine_due d
JOIN machine_provided p ON p.machine_id = d.machine_id
LEFT JOIN machine_hardware_report h ON h.machine_id = d.machine_id
LEFT JOIN machine_labels l ON l.machine_id = d.machine_id
LEFT JOIN machine_cluster_report v ON v.machine_id = d.machine_id
WHERE d.lane = 'access' AND d.phase_index IN ('Ready', 'Installed') AND d.machine_id > $1
  AND NOT EXISTS (SELECT 1 FROM machine_cluster c WHERE c.machine_id = d.machine_id)
  AND NOT EXISTS (SELECT 1 FROM machine_cluster_report r
                  WHERE r.machine_id = d.machine_id AND (r.node_key IS NOT NULL OR r.ca_certificate IS NOT NULL))
  AND NOT EXISTS (SELECT 1 FROM machine_retirement t WHERE t.machine_id = d.machine_id)
  AND NOT EXISTS (SELECT 1 FROM machine_quarantine q WHERE q.machine_id = d.machine_id)
  AND NOT EXISTS (SELECT 1 FROM machine_hold k
                  WHERE k.machine_id = d.machine_id AND (k.until IS NULL OR k.until > clock_timestamp()))
ORDER BY d.machine_id
LIMIT $2
