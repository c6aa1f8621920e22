UPDATE session
SET deadline = clock_timestamp() + interval_ms * INTERVAL '1 millisecond'
WHERE session_id = $1 AND closed_at IS NULL AND deadline > clock_timestamp()
RETURNING session_id
