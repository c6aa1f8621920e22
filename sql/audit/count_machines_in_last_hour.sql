-- Count the machines that bulk orders affected within the last hour, by the head rows of these orders (the
-- audit rows without a machine).
SELECT COALESCE(SUM(jsonb_array_length(after->'machines')), 0)::INT8 AS "machines!"
FROM audit
WHERE at > clock_timestamp() - INTERVAL '1 hour' AND rpc = $1 AND machine_id IS NULL AND outcome = 'changed'
  AND NOT dry_run
