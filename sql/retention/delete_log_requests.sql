-- Requests for logs that nobody came for within the time, once none of what was brought for them is left.
DELETE FROM log_request r
WHERE r.read_at < now() - $1::INT8 * INTERVAL '1 millisecond'
  AND NOT EXISTS (SELECT 1 FROM log_part p WHERE p.request_id = r.request_id)
