SELECT request_id, log, most_lines, since_seconds, follow, asked_at, asked_by, read_at, handed_at, handed_to, brought_at, parts,
    bytes, there, note, ended_at, failed
FROM log_request WHERE request_id = $1 AND machine_id = $2 FOR UPDATE
