-- Read the facts of one machine, as read_page.sql does for a page. It is a separate statement because the
-- server can plan this one once and keep the plan. A range is planned again each time, and planning so many
-- joins takes longer than reading the rows.
SELECT s.machine_id AS "machine_id!", s.created_at AS "created_at!",
       s.provider, s.provider_id, s.reservation, s.address, s.ssh_port, s.ssh_user, s.location,
       s.status, s.provided_at, s.looked_at, s.unchanged,
       s.agent_started_at, s.agent_public_key, s.agent_boot_id, s.agent_fence,
       s.heartbeat_at, s.heartbeat_boot_id, s.heartbeat_incarnation, s.heartbeat_sequence,
       s.request_generation, s.report_generation, s.report_succeeded,
       s.hold_scope, s.hold_reason, s.hold_by, s.hold_until,
       s.quarantine_since, s.quarantine_reason, s.needs_human_since, s.needs_human_reason,
       s.needs_human_obstacle, s.needs_human_reporting_since,
       s.recovery_started_at, s.recovery_rung, s.recovery_tries, s.recovery_step, s.recovery_acted_at,
       s.recovery_deadline, s.recovery_boot_id_before, s.recovery_next_at, s.recovery_note,
       s.recovery_obstacle,
       s.retirement_reason, s.retirement_requested_at, s.retirement_finished_at,
       CASE WHEN s.retirement_requested_at IS NOT NULL THEN (
           SELECT jsonb_build_object('by', t.requested_by, 'wipe', t.wipe, 'wipe_waived_at', t.wipe_waived_at,
                  'wipe_waived_by', t.wipe_waived_by, 'release_ordered_at', t.release_ordered_at,
                  'release_intent', t.release_intent, 'outcome', t.outcome, 'listed_since', t.listed_since)
           FROM machine_retirement t WHERE t.machine_id = s.machine_id) END AS retirement,
       (SELECT jsonb_build_object('switch', o.switch, 'reason', o.reason, 'by', o.ordered_by, 'at', o.ordered_at,
               'intent', o.intent_id, 'begun_at', o.begun_at)
        FROM machine_power_order o WHERE o.machine_id = s.machine_id) AS power_order,
       (SELECT jsonb_build_object('keys', k.keys, 'reason', k.reason, 'by', k.ordered_by, 'at', k.ordered_at,
               'until', k.expires_at)
          FROM machine_key_replacement k WHERE k.machine_id = s.machine_id) AS key_replacement,
       (SELECT jsonb_build_object('level', y.level, 'reason', y.reason, 'by', y.set_by, 'since', y.since,
               'until', y.until)
          FROM machine_priority y WHERE y.machine_id = s.machine_id) AS priority,
       s.backoffs, s.postponements,
       (SELECT min(l.since) FROM fleet_listening l, policy p
         WHERE l.last_commit > clock_timestamp() - p.listening_gap_ms * INTERVAL '1 millisecond')
           AS listening_since,
       clock_timestamp() AS "now!",
       (SELECT version FROM policy) AS "policy_version!"
FROM machine_snapshot s
WHERE s.machine_id = $1
