-- List live work after one item, longest running first. It never has more items than workers exist.
SELECT w.machine_id, p.provider AS "provider?", p.provider_id AS "provider_id?", w.lane, w.process, w.fence,
       w.started_at, w.session_id, s.component AS "component?", s.runtime_info AS "runtime_info?",
       s.deadline AS "session_deadline?", s.closed_at AS "session_closed_at?"
FROM work w
LEFT JOIN machine_provided p ON p.machine_id = w.machine_id
LEFT JOIN session s ON s.session_id = w.session_id
WHERE (w.started_at, w.machine_id, w.lane) > ($1, $2, $3)
ORDER BY w.started_at, w.machine_id, w.lane
LIMIT $4
