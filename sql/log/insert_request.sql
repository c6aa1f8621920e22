-- Insert a log request. The caller has locked the machine.
INSERT INTO log_request (request_id, machine_id, log, most_lines, since_seconds, follow, requested_at, requested_by,
                         read_at, parts, bytes)
VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp(), $7, clock_timestamp(), 0, 0)
