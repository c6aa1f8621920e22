-- List the due rows of a process that no session has leased, soonest first, from the one after (ready_at,
-- machine).
SELECT d.machine_id, p.provider AS "provider?", p.provider_id AS "provider_id?", d.lane, d.process AS "process!",
       d.ready_at AS "ready_at!", d.not_before, d.timer, d.priority, d.reason, d.decided_at
FROM machine_due d
LEFT JOIN machine_provided p ON p.machine_id = d.machine_id
WHERE d.process = $1 AND d.lease_session IS NULL AND d.bucket >= 0
  AND d.ready_at >= $2 AND (d.ready_at > $2 OR d.machine_id > $3)
ORDER BY d.ready_at, d.machine_id
LIMIT $4
