-- List the audit rows of one machine, as list.sql does for all machines.
SELECT audit_id, at, actor, credential_id, rpc, target, reason, idempotency_key, dry_run, outcome, message, before, after
FROM audit
WHERE machine_id = $4 AND at <= $1 AND (at, audit_id) < ($1, $2)
ORDER BY at DESC, audit_id DESC
LIMIT $3
