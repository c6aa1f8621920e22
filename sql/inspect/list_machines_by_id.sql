-- List these machines with what lists show and what they are filtered by. Each fact is looked up for its row: a plan that
-- merges tables would read them from their beginning up to the machine.
SELECT d.machine_id, d.provider, p.provider_id AS "provider_id?", p.address AS "address?",
       p.location AS "location?", d.phase_index AS phase, d.phase_since, h.at AS "heartbeat_at?",
       w.process AS "working?", d.process, d.ready_at, d.reason,
       r.memory_bytes AS "memory_bytes?", r.cpu_threads AS "cpu_threads?",
       r.manufacturer AS "manufacturer?", r.product AS "product?", d.timer,
       l.labels AS "labels?", y.level AS "priority?", c.name AS "cluster?",
       o.scope AS "hold_scope?", o.reason AS "hold_reason?", o.held_by AS "hold_by?", o.until AS "hold_until?"
FROM unnest($1::UUID[]) one (machine_id)
CROSS JOIN LATERAL (SELECT * FROM machine_due f WHERE f.machine_id = one.machine_id AND f.lane = 'access' LIMIT 1) d
LEFT JOIN LATERAL (SELECT * FROM machine_provided f WHERE f.machine_id = d.machine_id LIMIT 1) p ON true
LEFT JOIN LATERAL (SELECT * FROM machine_agent_heartbeat f WHERE f.machine_id = d.machine_id LIMIT 1) h ON true
LEFT JOIN LATERAL (SELECT * FROM machine_hardware_report f WHERE f.machine_id = d.machine_id LIMIT 1) r ON true
LEFT JOIN LATERAL (SELECT * FROM machine_labels f WHERE f.machine_id = d.machine_id LIMIT 1) l ON true
LEFT JOIN LATERAL (SELECT * FROM machine_priority f WHERE f.machine_id = d.machine_id
                   AND (f.until IS NULL OR f.until > clock_timestamp()) LIMIT 1) y ON true
LEFT JOIN LATERAL (SELECT k.name FROM machine_cluster f JOIN cluster k ON k.cluster_id = f.cluster_id
                   WHERE f.machine_id = d.machine_id LIMIT 1) c ON true
LEFT JOIN LATERAL (SELECT * FROM machine_hold f WHERE f.machine_id = d.machine_id
                   AND (f.until IS NULL OR f.until > clock_timestamp()) LIMIT 1) o ON true
LEFT JOIN LATERAL (SELECT * FROM work f WHERE f.machine_id = d.machine_id AND f.lane = d.lane LIMIT 1) w ON true
ORDER BY d.machine_id
