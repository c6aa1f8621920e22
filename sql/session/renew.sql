-- Renew the deadlines of these sessions. Rows that another transaction has locked are skipped, so that one of
-- them cannot let all the others expire.
UPDATE session
SET deadline = clock_timestamp() + interval_ms * INTERVAL '1 millisecond'
WHERE session_id IN (
    SELECT session_id FROM session
    WHERE session_id = ANY ($1) AND closed_at IS NULL AND deadline > clock_timestamp()
    ORDER BY session_id
    FOR NO KEY UPDATE SKIP LOCKED)
RETURNING session_id
