-- Count the sessions that expired recently, by component and host.
SELECT component, runtime_info ->> 'host' AS host, count(*) AS "count!", min(closed_at) AS "first_at!"
FROM session
WHERE closed_at > clock_timestamp() - $1 * INTERVAL '1 millisecond' AND close_reason = 'its deadline passed'
GROUP BY component, runtime_info ->> 'host'
