-- List the processes that failed, by machine, from the one after (machine, process).
SELECT b.machine_id, p.provider AS "provider?", p.provider_id AS "provider_id?", b.process, b.failures, b.until, b.cause
FROM work_backoff b
LEFT JOIN machine_provided p ON p.machine_id = b.machine_id
WHERE (b.machine_id, b.process) > ($1, $2)
ORDER BY b.machine_id, b.process
LIMIT $3
