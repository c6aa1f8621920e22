-- List the values from which issues of a page of machines are derived, besides their facts.
SELECT d.machine_id, d.phase_since, d.losses, h.version AS "agent_version?",
       r.serial_number AS "serial_number?", r.report AS "report?", k.refused_at AS "refused_at?",
       c.error AS "node_problem?", c.reported_at AS "node_problem_at?", p.findings AS "findings?"
FROM machine_due d
LEFT JOIN machine_agent_heartbeat h ON h.machine_id = d.machine_id
LEFT JOIN machine_hardware_report r ON r.machine_id = d.machine_id
LEFT JOIN machine_ssh_host_key k ON k.machine_id = d.machine_id
LEFT JOIN machine_cluster_report c ON c.machine_id = d.machine_id AND c.ca_certificate IS NOT NULL
LEFT JOIN machine_release_report p ON p.machine_id = d.machine_id
WHERE d.machine_id = ANY ($1) AND d.lane = 'access'
