-- Delete parts of logs that no client fetched within the time limit. A part is large, so a batch is small.
DELETE FROM log_part p
WHERE (p.request_id, p.number) IN (
    SELECT o.request_id, o.number FROM log_part o
    JOIN log_request r ON r.request_id = o.request_id
    WHERE r.read_at < now() - $1::INT8 * INTERVAL '1 millisecond'
    LIMIT $2)
