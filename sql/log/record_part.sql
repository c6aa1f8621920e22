UPDATE log_request
SET last_part_at = clock_timestamp(), parts = $2, bytes = bytes + $3, available_logs = COALESCE($4, available_logs),
    note = COALESCE($5, note),
    ended_at = CASE WHEN $6 THEN clock_timestamp() END, failed = $7
WHERE request_id = $1
