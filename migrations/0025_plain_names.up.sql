-- Plain names for columns that were added after migration 0003. Columns of the first three migrations keep their names,
-- because the previous release runs on them during an upgrade. Values and JSON documents do not change.
ALTER TABLE approval RENAME COLUMN asked_at TO requested_at;
ALTER TABLE audit RENAME COLUMN said TO message;
ALTER TABLE cluster RENAME COLUMN snapshot_asked_at TO snapshot_requested_at;
ALTER TABLE cluster RENAME COLUMN key_asked_at TO key_rotation_requested_at;
ALTER TABLE cluster RENAME COLUMN key_asked_by TO key_rotation_requested_by;
ALTER TABLE cluster RENAME COLUMN looked_at TO polled_at;
ALTER TABLE cluster RENAME COLUMN seen_at TO observed_at;
ALTER TABLE cluster RENAME COLUMN away_since TO unreachable_since;
ALTER TABLE cluster RENAME COLUMN waits TO wait_reasons;
ALTER TABLE cluster_credential RENAME COLUMN asked_at TO requested_at;
ALTER TABLE cluster_credential RENAME COLUMN asked_by TO requested_by;
ALTER TABLE cluster_credential RENAME COLUMN revoke_asked_at TO revocation_requested_at;
ALTER TABLE cluster_credential RENAME COLUMN revoke_asked_by TO revocation_requested_by;
ALTER TABLE cluster_kubernetes RENAME COLUMN asked_at TO requested_at;
ALTER TABLE cluster_kubernetes RENAME COLUMN asked_by TO requested_by;
ALTER TABLE cluster_kubernetes RENAME COLUMN known TO observed;
ALTER TABLE cluster_kubernetes_user RENAME COLUMN asked_at TO requested_at;
ALTER TABLE cluster_kubernetes_user RENAME COLUMN asked_by TO requested_by;
ALTER TABLE cluster_upgrade RENAME COLUMN asked TO requested_nodes;
ALTER TABLE log_request RENAME COLUMN asked_at TO requested_at;
ALTER TABLE log_request RENAME COLUMN asked_by TO requested_by;
ALTER TABLE log_request RENAME COLUMN handed_at TO delivered_at;
ALTER TABLE log_request RENAME COLUMN handed_to TO delivered_to;
ALTER TABLE log_request RENAME COLUMN brought_at TO last_part_at;
ALTER TABLE log_request RENAME COLUMN there TO available_logs;
ALTER TABLE machine_cluster RENAME COLUMN seen_at TO observed_at;
ALTER TABLE machine_cluster RENAME COLUMN waits TO wait_reason;
ALTER TABLE machine_release_report RENAME COLUMN became TO updated_to;
ALTER TABLE roll_out_machine RENAME COLUMN said TO message;

-- The view is dropped and created again, because CockroachDB does not rename a column that a view uses. Except for the
-- name of that column it does not change.
DROP VIEW machine_snapshot;
ALTER TABLE machine_needs_human RENAME COLUMN heard_since TO reporting_since;
CREATE VIEW machine_snapshot AS
SELECT
    m.machine_id,
    m.created_at,
    p.provider, p.provider_id, p.reservation, p.address, p.ssh_port, p.ssh_user, p.location,
    p.status, p.provided_at, p.looked_at, p.unchanged,
    a.started_at AS agent_started_at, a.public_key AS agent_public_key, a.boot_id AS agent_boot_id,
    a.fence AS agent_fence,
    h.at AS heartbeat_at, h.boot_id AS heartbeat_boot_id, h.incarnation AS heartbeat_incarnation,
    h.sequence AS heartbeat_sequence,
    q.generation AS request_generation,
    r.generation AS report_generation, r.succeeded AS report_succeeded,
    o.scope AS hold_scope, o.reason AS hold_reason, o.held_by AS hold_by, o.until AS hold_until,
    u.since AS quarantine_since, u.reason AS quarantine_reason,
    n.since AS needs_human_since, n.reason AS needs_human_reason,
    c.started_at AS recovery_started_at, c.rung AS recovery_rung, c.tries AS recovery_tries,
    c.step AS recovery_step, c.acted_at AS recovery_acted_at, c.deadline AS recovery_deadline,
    c.boot_id_before AS recovery_boot_id_before, c.next_at AS recovery_next_at, c.note AS recovery_note,
    t.reason AS retirement_reason, t.requested_at AS retirement_requested_at,
    t.finished_at AS retirement_finished_at,
    (SELECT jsonb_agg(jsonb_build_object('process', b.process, 'failures', b.failures,
            'last_interval_ms', b.last_interval_ms, 'until', b.until, 'cause', b.cause))
       FROM work_backoff b WHERE b.machine_id = m.machine_id) AS backoffs,
    (SELECT jsonb_agg(jsonb_build_object('process', w.process, 'until', w.until, 'reason', w.reason,
            'decided_at', w.decided_at))
       FROM work_postponed w WHERE w.machine_id = m.machine_id) AS postponements,
    n.obstacle AS needs_human_obstacle, n.reporting_since AS needs_human_reporting_since,
    c.obstacle AS recovery_obstacle
FROM machine m
LEFT JOIN machine_provided p ON p.machine_id = m.machine_id
LEFT JOIN machine_agent_started a ON a.machine_id = m.machine_id
LEFT JOIN machine_agent_heartbeat h ON h.machine_id = m.machine_id
LEFT JOIN machine_os_installation_request q ON q.machine_id = m.machine_id
LEFT JOIN machine_os_installation_report r ON r.machine_id = m.machine_id
LEFT JOIN machine_hold o ON o.machine_id = m.machine_id
LEFT JOIN machine_quarantine u ON u.machine_id = m.machine_id
LEFT JOIN machine_needs_human n ON n.machine_id = m.machine_id
LEFT JOIN machine_recovery c ON c.machine_id = m.machine_id
LEFT JOIN machine_retirement t ON t.machine_id = m.machine_id;
