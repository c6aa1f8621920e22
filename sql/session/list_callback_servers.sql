-- Where agents can report: what the callback servers that are alive say of themselves.
SELECT runtime_info FROM session
WHERE component = 'callback' AND closed_at IS NULL AND deadline > clock_timestamp()
