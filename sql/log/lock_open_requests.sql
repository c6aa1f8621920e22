-- Lock the log requests of a machine that have not ended, oldest first.
SELECT request_id, log, most_lines, since_seconds, follow, requested_at, requested_by, read_at, delivered_at, delivered_to,
    last_part_at, parts, bytes, available_logs, note, ended_at, failed
FROM log_request WHERE machine_id = $1 AND ended_at IS NULL ORDER BY requested_at, request_id FOR UPDATE
