-- List the work of these sessions, with what the due rows of that work contain now.
SELECT w.session_id, w.machine_id, w.lane, w.fence, w.process, d.process AS due_process, d.reason,
       d.lease_session = w.session_id AND d.fence = w.fence AS "is_leased!"
FROM work w
JOIN machine_due d ON d.machine_id = w.machine_id AND d.lane = w.lane
WHERE w.session_id = ANY ($1)
ORDER BY w.machine_id, w.lane
