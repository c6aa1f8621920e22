-- List what the live callback servers report about themselves: where agents can report.
SELECT runtime_info FROM session
WHERE component = 'callback' AND closed_at IS NULL AND deadline > clock_timestamp()
