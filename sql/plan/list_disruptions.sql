-- List the disruptions of machines within the longest window that a budget or a brake looks back over.
SELECT kind, provider, machine_id AS "machine_id!", begun_at
FROM intent
WHERE kind IN ('restart-agent', 'reboot', 'power-cycle') AND machine_id IS NOT NULL
  AND begun_at > clock_timestamp() - $1 * INTERVAL '1 millisecond'
ORDER BY begun_at, intent_id
