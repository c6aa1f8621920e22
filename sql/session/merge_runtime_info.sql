-- What the process that has a session says of itself by now.
UPDATE session SET runtime_info = runtime_info || $2 WHERE session_id = $1 AND closed_at IS NULL
