-- Delete sessions that were closed long ago and own nothing. What a session still owns is freed by way of its
-- row. What it may own is looked up by key, because with a join the planner reads whole tables for it.
DELETE FROM session s
WHERE s.session_id = ANY (ARRAY(
    SELECT o.session_id FROM session o
    WHERE o.closed_at < now() - $1::INT8 * INTERVAL '1 millisecond'
      AND (SELECT w.fence FROM work w WHERE w.session_id = o.session_id LIMIT 1) IS NULL
      AND (SELECT l.fence FROM named_lease l WHERE l.lease_session = o.session_id LIMIT 1) IS NULL
    ORDER BY o.closed_at LIMIT $2))
