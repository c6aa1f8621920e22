-- List the newest steps that were taken on a machine after a moment, newest first.
SELECT i.kind, i.detail, i.begun_at, i.settled_at, i.outcome
FROM intent i
WHERE i.machine_id = $1 AND i.begun_at > $2
ORDER BY i.begun_at DESC
LIMIT $3
