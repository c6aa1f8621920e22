-- List what the live API servers report about themselves, newest first: where operators can send requests.
SELECT runtime_info FROM session
WHERE component = 'api' AND closed_at IS NULL AND deadline > clock_timestamp()
ORDER BY session_id DESC
