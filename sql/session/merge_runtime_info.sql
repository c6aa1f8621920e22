-- Merge what the process of a session now reports about itself into the session's runtime_info.
UPDATE session SET runtime_info = runtime_info || $2 WHERE session_id = $1 AND closed_at IS NULL
