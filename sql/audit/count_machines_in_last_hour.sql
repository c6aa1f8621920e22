-- Machines that orders about many were about within the last hour, by the head lines of such orders.
SELECT COALESCE(SUM(jsonb_array_length(after->'machines')), 0)::INT8 AS "machines!"
FROM audit
WHERE at > clock_timestamp() - INTERVAL '1 hour' AND rpc = $1 AND machine_id IS NULL AND outcome = 'changed'
  AND NOT dry_run
