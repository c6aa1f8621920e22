-- List the machines of a cluster in the order in which they were chosen.
SELECT c.machine_id, c.part, c.chosen_at, c.leaving, c.approved, c.wait_reason, c.node_id, c.node_state, c.roles, c.health,
       c.voter, c.services, c.kubernetes, c.observed_at, d.phase_index AS phase, p.provider_id AS "provider_id?",
       p.location AS "location?", h.manufacturer AS "manufacturer?", h.product AS "product?",
       h.memory_bytes AS "memory_bytes?", h.cpu_threads AS "cpu_threads?",
       t.machine_id IS NOT NULL AS "retiring!",
       c.keep_authority OR COALESCE(t.keep_authority, FALSE) AS "keep_authority!",
       o.what AS "what?", o.generation AS "ordered_generation?", o.ordered_at AS "ordered_at?",
       r.generation AS "reported?", r.node_key AS "node_key?", r.ca_certificate AS "ca_certificate?",
       r.address AS "address?", r.error AS "error?", r.epoch AS "epoch?", r.reported_at AS "reported_at?",
       r.next_authority AS "next_authority?", r.next_authority_step AS "next_authority_step?",
       r.etcd_version AS "etcd_version?", r.etcdutl_version AS "etcdutl_version?", r.secrets AS "secrets?",
       p.provider AS "provider?", p.address AS "listed_address?"
FROM machine_cluster c
JOIN machine_due d ON d.machine_id = c.machine_id AND d.lane = 'access'
LEFT JOIN machine_provided p ON p.machine_id = c.machine_id
LEFT JOIN machine_hardware_report h ON h.machine_id = c.machine_id
LEFT JOIN machine_retirement t ON t.machine_id = c.machine_id
LEFT JOIN cluster_order o ON o.machine_id = c.machine_id
LEFT JOIN machine_cluster_report r ON r.machine_id = c.machine_id
WHERE c.cluster_id = $1
ORDER BY c.chosen_at, c.machine_id
