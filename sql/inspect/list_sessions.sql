-- List open sessions after one, oldest first: their ids begin with the time.
SELECT s.session_id, s.process_id, s.component, s.runtime_info, s.started_at, s.deadline,
       (SELECT count(*) FROM work w WHERE w.session_id = s.session_id) AS "work!"
FROM session s
WHERE s.closed_at IS NULL AND s.session_id > $1
ORDER BY s.session_id
LIMIT $2
