SELECT request_id, log, most_lines, since_seconds, follow, requested_at, requested_by, read_at, delivered_at, delivered_to,
    last_part_at, parts, bytes, available_logs, note, ended_at, failed
FROM log_request WHERE request_id = $1 AND machine_id = $2 FOR UPDATE
