-- As batch.sql, for a database that cannot skip locked rows.
WITH n AS MATERIALIZED (
    SELECT n.machine_id, n.public_key, n.boot_id, n.incarnation, n.sequence, n.version
    FROM unnest($1::UUID[], $2::BYTEA[], $3::TEXT[], $4::TEXT[], $5::INT8[], $6::TEXT[])
        AS n (machine_id, public_key, boot_id, incarnation, sequence, version)
    JOIN machine_agent_heartbeat h ON h.machine_id = n.machine_id
    ORDER BY n.machine_id
    FOR NO KEY UPDATE OF h)
UPDATE machine_agent_heartbeat h
SET at = now(), incarnation = n.incarnation, sequence = n.sequence, version = n.version
FROM n
JOIN machine_agent_started a ON a.machine_id = n.machine_id AND a.public_key = n.public_key
JOIN machine_due d ON d.machine_id = n.machine_id AND d.lane = 'access'
LEFT JOIN machine_hardware_report w ON w.machine_id = n.machine_id AND w.incarnation = n.incarnation
LEFT JOIN machine_os_installation_report r ON r.machine_id = n.machine_id
LEFT JOIN machine_os_installation_request q
       ON q.machine_id = n.machine_id AND q.generation IS DISTINCT FROM r.generation
WHERE h.machine_id = n.machine_id AND h.boot_id = n.boot_id AND h.sequence < n.sequence
  AND d.phase_index NOT IN ('AgentStarting', 'Silent', 'Recovering')
RETURNING h.machine_id AS "machine_id!", a.public_key AS "public_key!", w.machine_id IS NULL AS "wants_report!",
          q.generation AS "generation?", q.artefact_url AS "artefact_url?",
          q.artefact_sha256 AS "artefact_sha256?"
