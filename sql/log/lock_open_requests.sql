-- Lock the log requests of a machine that have not ended, oldest first.
SELECT request_id, log, most_lines, since_seconds, follow, asked_at, asked_by, read_at, handed_at, handed_to, brought_at, parts,
    bytes, there, note, ended_at, failed
FROM log_request WHERE machine_id = $1 AND ended_at IS NULL ORDER BY asked_at, request_id FOR UPDATE
