-- Count the machines in each phase, by the facts and not by the index. Twin of phase_of in
-- crates/model/src/phase.rs: change both.
SELECT phase AS "phase!", count(*) AS "count!" FROM (
    SELECT s.machine_id,
           CASE
               WHEN s.retirement_finished_at IS NOT NULL THEN 'Retired'
               WHEN s.retirement_requested_at IS NOT NULL THEN 'Retiring'
               WHEN s.quarantine_since IS NOT NULL THEN 'Quarantined'
               WHEN s.needs_human_since IS NOT NULL THEN 'NeedsHuman'
               WHEN s.recovery_started_at IS NOT NULL THEN 'Recovering'
               WHEN s.provided_at IS NULL THEN 'New'
               WHEN s.agent_started_at IS NULL AND s.address IS NOT NULL AND s.status <> 'Provisioning'
                   THEN 'Provided'
               WHEN s.agent_started_at IS NULL THEN 'Provisioning'
               WHEN l.since IS NOT NULL
                   AND GREATEST(s.agent_started_at, s.heartbeat_at, l.since)
                       + CASE WHEN s.heartbeat_at IS NULL THEN l.first ELSE l.silence END <= now()
                   THEN 'Silent'
               WHEN s.heartbeat_at IS NULL THEN 'AgentStarting'
               ELSE 'Ready'
           END AS phase
    FROM machine_snapshot s
    CROSS JOIN (
        SELECT p.silence_timeout_ms * INTERVAL '1 millisecond' AS silence,
               p.first_heartbeat_timeout_ms * INTERVAL '1 millisecond' AS first,
               (SELECT min(f.since) FROM fleet_listening f
                 WHERE f.last_commit > now() - p.listening_gap_ms * INTERVAL '1 millisecond') AS since
        FROM policy p) l
) each
GROUP BY phase
