-- Store one heartbeat per machine and key, in the plain case in which nothing but the time of the last report
-- changes. A heartbeat that is not returned is evaluated individually. This is a statement of its own, sent
-- once the rows are locked. It therefore sees that a machine was found silent before that, and no later
-- statement finds a machine silent without seeing this heartbeat.
UPDATE machine_agent_heartbeat h
SET at = now(), incarnation = n.incarnation, sequence = n.sequence, version = n.version
FROM unnest($1::UUID[], $2::BYTEA[], $3::TEXT[], $4::TEXT[], $5::INT8[], $6::TEXT[])
    AS n (machine_id, public_key, boot_id, incarnation, sequence, version)
JOIN machine_agent_started a ON a.machine_id = n.machine_id AND a.public_key = n.public_key
JOIN machine_due d ON d.machine_id = n.machine_id AND d.lane = 'access'
LEFT JOIN machine_hardware_report w ON w.machine_id = n.machine_id AND w.incarnation = n.incarnation
LEFT JOIN machine_os_installation_report r ON r.machine_id = n.machine_id
LEFT JOIN machine_os_installation_request q
       ON q.machine_id = n.machine_id AND q.generation IS DISTINCT FROM r.generation
LEFT JOIN machine_cluster_report c ON c.machine_id = n.machine_id
LEFT JOIN cluster_order o
       ON o.machine_id = n.machine_id AND o.sealed IS NOT NULL AND o.generation IS DISTINCT FROM c.generation
LEFT JOIN machine_release_report p ON p.machine_id = n.machine_id
LEFT JOIN release_order e
       ON e.machine_id = n.machine_id AND NOT e.withdrawn AND e.generation IS DISTINCT FROM p.generation
LEFT JOIN (SELECT DISTINCT machine_id FROM log_request WHERE ended_at IS NULL) l ON l.machine_id = n.machine_id
WHERE h.machine_id = n.machine_id AND h.boot_id = n.boot_id AND h.sequence < n.sequence
  AND d.phase_index NOT IN ('AgentStarting', 'Silent', 'Recovering', 'NeedsHuman', 'Retired')
RETURNING h.machine_id AS "machine_id!", a.public_key AS "public_key!", w.machine_id IS NULL AS "wants_report!",
          GREATEST(d.fence, a.fence) AS "known_fence!",
          q.generation AS "generation?", q.artefact_url AS "artefact_url?",
          q.artefact_sha256 AS "artefact_sha256?",
          o.generation AS "cluster_generation?", o.sealed AS "cluster_order?",
          e.generation AS "release_generation?", e.sha256 AS "release_sha256?",
          e.deadline_seconds AS "release_deadline?", l.machine_id IS NOT NULL AS "wants_logs!"
