-- List the machines of a roll-out with everything that decides about them.
SELECT m.machine_id, m.state, m.generation, m.message, m.changed_at, p.provider AS "provider?",
       p.provider_id AS "provider_id?", d.phase_index AS phase, r.generation AS "reported?", r.sha256 AS "running?",
       r.error AS "error?", r.reported_at AS "reported_at?",
       k.held_by AS "held_by?", k.reason AS "held_for?", q.reason AS "quarantined?",
       t.machine_id IS NOT NULL AS "retiring!",
       c.part AS "part?", c.health AS "health?", c.observed_at AS "observed_at?", c.leaving AS "leaving?",
       u.name AS "cluster?", u.voters AS "voters?", u.voters_reached AS "voters_reached?",
       u.etcd_full_since AS "etcd_full_since?",
       u.founded_at IS NOT NULL AS "founded!", clock_timestamp() AS "now!"
FROM roll_out_machine m
JOIN machine_due d ON d.machine_id = m.machine_id AND d.lane = 'access'
LEFT JOIN machine_provided p ON p.machine_id = m.machine_id
LEFT JOIN machine_release_report r ON r.machine_id = m.machine_id
LEFT JOIN machine_hold k ON k.machine_id = m.machine_id AND (k.until IS NULL OR k.until > clock_timestamp())
LEFT JOIN machine_quarantine q ON q.machine_id = m.machine_id
LEFT JOIN machine_retirement t ON t.machine_id = m.machine_id
LEFT JOIN machine_cluster c ON c.machine_id = m.machine_id
LEFT JOIN cluster u ON u.cluster_id = c.cluster_id
WHERE m.roll_out_id = $1
ORDER BY m.machine_id
