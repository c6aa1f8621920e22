-- One session, if nobody has its row locked: told so at once otherwise.
UPDATE session
SET deadline = clock_timestamp() + interval_ms * INTERVAL '1 millisecond'
WHERE session_id IN (
    SELECT session_id FROM session
    WHERE session_id = $1 AND closed_at IS NULL AND deadline > clock_timestamp()
    FOR NO KEY UPDATE NOWAIT)
RETURNING session_id
