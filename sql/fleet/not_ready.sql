-- Machines that are not Ready, and what each waits for; with each the counts of the same moment.
SELECT (SELECT count(*) FROM machine_due r WHERE r.lane = 'access' AND r.phase_index = 'Ready') AS "ready!",
       count(*) OVER () AS "waiting!",
       d.machine_id, p.provider_id AS "provider_id?", d.phase_index, d.reason, d.decided_at, b.cause AS "cause?"
FROM machine_due d
LEFT JOIN machine_provided p ON p.machine_id = d.machine_id
LEFT JOIN work_backoff b ON b.machine_id = d.machine_id AND b.process = d.process
WHERE d.lane = 'access' AND d.phase_index <> 'Ready'
ORDER BY p.provider_id, d.machine_id
LIMIT $1
