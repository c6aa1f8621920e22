-- List the lanes of a machine, each with its schedule and the session that works on it.
SELECT d.lane, d.process, d.priority, d.ready_at, d.timer, d.reason, d.decided_at, d.deadline,
       d.phase_index, d.phase_since, d.rules_version, d.policy_version, d.fence, d.losses, d.not_before,
       w.process AS "work_process?", w.fence AS "work_fence?", w.started_at AS "work_started_at?",
       w.session_id AS "session_id?", s.component AS "component?", s.runtime_info AS "runtime_info?",
       s.deadline AS "session_deadline?", s.closed_at AS "session_closed_at?"
FROM machine_due d
LEFT JOIN work w ON w.machine_id = d.machine_id AND w.lane = d.lane
LEFT JOIN session s ON s.session_id = w.session_id
WHERE d.machine_id = $1
ORDER BY d.lane
