-- Where operators can ask: what the API servers that are alive say of themselves, the newest first.
SELECT runtime_info FROM session
WHERE component = 'api' AND closed_at IS NULL AND deadline > clock_timestamp()
ORDER BY session_id DESC
