-- List the machines that are neither Ready nor Retired, each with the counts at the same moment.
SELECT (SELECT count(*) FROM machine_due r WHERE r.lane = 'access' AND r.phase_index = 'Ready') AS "ready!",
       count(*) OVER () AS "waiting!", d.machine_id
FROM machine_due d
LEFT JOIN machine_provided p ON p.machine_id = d.machine_id
WHERE d.lane = 'access' AND d.phase_index NOT IN ('Ready', 'Retired')
ORDER BY p.provider_id, d.machine_id
LIMIT $1
