-- Read what a heartbeat is evaluated by and answered with, besides the snapshot. The caller has locked the
-- machine.
SELECT (SELECT h.previous_boot_id FROM machine_agent_heartbeat h WHERE h.machine_id = $1) AS previous_boot_id,
       (SELECT w.incarnation FROM machine_hardware_report w WHERE w.machine_id = $1) AS report_incarnation,
       q.generation AS "generation?", q.artefact_url AS "artefact_url?", q.artefact_sha256 AS "artefact_sha256?",
       o.generation AS "cluster_generation?", o.sealed AS "cluster_order?",
       c.generation AS "reported_generation?", c.node_key AS "reported_key?", c.ca_certificate AS "reported_ca?",
       c.address AS "reported_address?", c.error AS "reported_error?",
       c.epoch AS "reported_epoch?", c.next_authority AS "reported_next_authority?",
       c.next_authority_step AS "reported_authority_step?",
       c.etcd_version AS "reported_etcd?", c.etcdutl_version AS "reported_etcdutl?", c.secrets AS "reported_secrets?",
       e.generation AS "release_generation?", e.sha256 AS "release_sha256?", e.deadline_seconds AS "release_deadline?",
       p.generation AS "running_generation?", p.sha256 AS "running_sha256?", p.error AS "running_error?",
       p.findings AS "running_findings?",
       EXISTS (SELECT 1 FROM log_request l WHERE l.machine_id = $1 AND l.ended_at IS NULL) AS "wants_logs!"
FROM machine m
LEFT JOIN machine_os_installation_request q ON q.machine_id = m.machine_id
LEFT JOIN cluster_order o ON o.machine_id = m.machine_id AND o.sealed IS NOT NULL
LEFT JOIN machine_cluster_report c ON c.machine_id = m.machine_id
LEFT JOIN release_order e ON e.machine_id = m.machine_id AND NOT e.withdrawn
LEFT JOIN machine_release_report p ON p.machine_id = m.machine_id
WHERE m.machine_id = $1
