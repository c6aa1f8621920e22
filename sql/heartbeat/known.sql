-- What a heartbeat is judged by and answered with, besides the snapshot. Read under the machine's lock.
SELECT (SELECT h.previous_boot_id FROM machine_agent_heartbeat h WHERE h.machine_id = $1) AS previous_boot_id,
       (SELECT w.incarnation FROM machine_hardware_report w WHERE w.machine_id = $1) AS report_incarnation,
       q.generation AS "generation?", q.artefact_url AS "artefact_url?", q.artefact_sha256 AS "artefact_sha256?"
FROM machine m
LEFT JOIN machine_os_installation_request q ON q.machine_id = m.machine_id
WHERE m.machine_id = $1
