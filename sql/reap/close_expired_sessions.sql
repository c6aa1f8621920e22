-- Close the sessions whose deadline has passed. The array makes the UPDATE go by key: with a join, it reads
-- every session that ever existed.
WITH expired_session AS MATERIALIZED (
    SELECT session_id FROM session
    WHERE closed_at IS NULL AND deadline < clock_timestamp() - INTERVAL '300 milliseconds'
    ORDER BY session_id LIMIT 100
    FOR UPDATE SKIP LOCKED)
UPDATE session s
SET closed_at = clock_timestamp(), close_reason = 'its deadline passed'
WHERE s.session_id = ANY (ARRAY(SELECT session_id FROM expired_session)) AND s.closed_at IS NULL
RETURNING s.session_id
