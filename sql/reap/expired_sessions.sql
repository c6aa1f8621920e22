SELECT session_id FROM session
WHERE closed_at IS NULL AND deadline < clock_timestamp() - INTERVAL '300 milliseconds'
ORDER BY session_id LIMIT 100
