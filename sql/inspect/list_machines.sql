-- List one page of one (phase, provider), in the order of ids, with the values that lists are filtered by.
-- Each fact is looked up for its row: a plan that merges tables would read them from their beginning up to
-- the page.
SELECT d.machine_id, d.provider, p.provider_id AS "provider_id?", p.address AS "address?",
       p.location AS "location?", d.phase_index AS phase, d.phase_since, h.at AS "heartbeat_at?",
       w.process AS "working?", d.process, d.ready_at, d.reason,
       r.memory_bytes AS "memory_bytes?", r.cpu_threads AS "cpu_threads?",
       r.manufacturer AS "manufacturer?", r.product AS "product?", d.timer,
       l.labels AS "labels?", y.level AS "priority?"
FROM machine_due d
LEFT JOIN LATERAL (SELECT * FROM machine_provided f WHERE f.machine_id = d.machine_id LIMIT 1) p ON true
LEFT JOIN LATERAL (SELECT * FROM machine_agent_heartbeat f WHERE f.machine_id = d.machine_id LIMIT 1) h ON true
LEFT JOIN LATERAL (SELECT * FROM machine_hardware_report f WHERE f.machine_id = d.machine_id LIMIT 1) r ON true
LEFT JOIN LATERAL (SELECT * FROM machine_labels f WHERE f.machine_id = d.machine_id LIMIT 1) l ON true
LEFT JOIN LATERAL (SELECT * FROM machine_priority f WHERE f.machine_id = d.machine_id
                   AND (f.until IS NULL OR f.until > clock_timestamp()) LIMIT 1) y ON true
LEFT JOIN LATERAL (SELECT * FROM work f WHERE f.machine_id = d.machine_id AND f.lane = d.lane LIMIT 1) w ON true
WHERE d.lane = 'access' AND d.phase_index = $1 AND d.provider = $2 AND d.machine_id > $3
ORDER BY d.machine_id
LIMIT $4
