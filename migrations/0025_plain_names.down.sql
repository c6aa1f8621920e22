DROP VIEW machine_snapshot;
ALTER TABLE machine_needs_human RENAME COLUMN reporting_since TO heard_since;
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
    n.obstacle AS needs_human_obstacle, n.heard_since AS needs_human_heard_since,
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

ALTER TABLE roll_out_machine RENAME COLUMN message TO said;
ALTER TABLE machine_release_report RENAME COLUMN updated_to TO became;
ALTER TABLE machine_cluster RENAME COLUMN wait_reason TO waits;
ALTER TABLE machine_cluster RENAME COLUMN observed_at TO seen_at;
ALTER TABLE log_request RENAME COLUMN available_logs TO there;
ALTER TABLE log_request RENAME COLUMN last_part_at TO brought_at;
ALTER TABLE log_request RENAME COLUMN delivered_to TO handed_to;
ALTER TABLE log_request RENAME COLUMN delivered_at TO handed_at;
ALTER TABLE log_request RENAME COLUMN requested_by TO asked_by;
ALTER TABLE log_request RENAME COLUMN requested_at TO asked_at;
ALTER TABLE cluster_upgrade RENAME COLUMN requested_nodes TO asked;
ALTER TABLE cluster_kubernetes_user RENAME COLUMN requested_by TO asked_by;
ALTER TABLE cluster_kubernetes_user RENAME COLUMN requested_at TO asked_at;
ALTER TABLE cluster_kubernetes RENAME COLUMN observed TO known;
ALTER TABLE cluster_kubernetes RENAME COLUMN requested_by TO asked_by;
ALTER TABLE cluster_kubernetes RENAME COLUMN requested_at TO asked_at;
ALTER TABLE cluster_credential RENAME COLUMN revocation_requested_by TO revoke_asked_by;
ALTER TABLE cluster_credential RENAME COLUMN revocation_requested_at TO revoke_asked_at;
ALTER TABLE cluster_credential RENAME COLUMN requested_by TO asked_by;
ALTER TABLE cluster_credential RENAME COLUMN requested_at TO asked_at;
ALTER TABLE cluster RENAME COLUMN wait_reasons TO waits;
ALTER TABLE cluster RENAME COLUMN unreachable_since TO away_since;
ALTER TABLE cluster RENAME COLUMN observed_at TO seen_at;
ALTER TABLE cluster RENAME COLUMN polled_at TO looked_at;
ALTER TABLE cluster RENAME COLUMN key_rotation_requested_by TO key_asked_by;
ALTER TABLE cluster RENAME COLUMN key_rotation_requested_at TO key_asked_at;
ALTER TABLE cluster RENAME COLUMN snapshot_requested_at TO snapshot_asked_at;
ALTER TABLE audit RENAME COLUMN message TO said;
ALTER TABLE approval RENAME COLUMN requested_at TO asked_at;
