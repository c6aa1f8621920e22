-- What closed sessions still hold. There is never more work than workers; each one's session is looked
-- up by key, because joined, the planner reads every session there ever was.
SELECT w.machine_id, w.lane
FROM work w
WHERE (SELECT s.closed_at FROM session s WHERE s.session_id = w.session_id) IS NOT NULL
ORDER BY w.machine_id, w.lane
LIMIT 500
