-- Machines that fell silent, or whose ladder began, within the brake's window, by provider.
SELECT d.provider, count(*) AS "count!"
FROM machine_due d
LEFT JOIN machine_recovery r ON r.machine_id = d.machine_id
WHERE d.lane = 'access' AND d.phase_index IN ('Silent', 'Recovering')
  AND COALESCE(r.started_at, d.phase_since) > clock_timestamp() - $1 * INTERVAL '1 millisecond'
GROUP BY d.provider
