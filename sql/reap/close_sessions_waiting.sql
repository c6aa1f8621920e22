-- As close_sessions.sql, for a database that cannot skip locked rows: one session, if nobody has its
-- row locked.
WITH dead AS MATERIALIZED (
    SELECT session_id FROM session
    WHERE session_id = $1 AND closed_at IS NULL AND deadline < clock_timestamp() - INTERVAL '300 milliseconds'
    FOR UPDATE NOWAIT)
UPDATE session s
SET closed_at = clock_timestamp(), close_reason = 'its deadline passed'
WHERE s.session_id = ANY (ARRAY(SELECT session_id FROM dead)) AND s.closed_at IS NULL
RETURNING s.session_id
