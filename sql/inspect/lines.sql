-- These machines as lists have them.
SELECT d.machine_id, d.provider, p.provider_id AS "provider_id?", p.address AS "address?",
       p.location AS "location?", d.phase_index AS phase, d.phase_since, h.at AS "heartbeat_at?",
       w.process AS "working?", d.process, d.ready_at, d.reason,
       r.manufacturer AS "manufacturer?", r.product AS "product?"
FROM machine_due d
LEFT JOIN machine_provided p ON p.machine_id = d.machine_id
LEFT JOIN machine_agent_heartbeat h ON h.machine_id = d.machine_id
LEFT JOIN machine_hardware_report r ON r.machine_id = d.machine_id
LEFT JOIN work w ON w.machine_id = d.machine_id AND w.lane = d.lane
WHERE d.lane = 'access' AND d.machine_id = ANY ($1)
ORDER BY d.machine_id
