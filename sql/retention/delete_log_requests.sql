-- Delete log requests that no client came back to within the time limit, once all of their parts are deleted.
DELETE FROM log_request r
WHERE r.read_at < now() - $1::INT8 * INTERVAL '1 millisecond'
  AND NOT EXISTS (SELECT 1 FROM log_part p WHERE p.request_id = r.request_id)
