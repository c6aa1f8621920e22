-- As renew.sql, for a database that cannot skip locked rows.
UPDATE session
SET deadline = clock_timestamp() + interval_ms * INTERVAL '1 millisecond'
WHERE session_id IN (
    SELECT session_id FROM session
    WHERE session_id = ANY ($1) AND closed_at IS NULL AND deadline > clock_timestamp()
    ORDER BY session_id
    FOR NO KEY UPDATE)
RETURNING session_id
