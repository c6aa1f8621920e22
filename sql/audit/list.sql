-- List audit rows, newest first, from the one after (at, audit_id).
SELECT audit_id, at, actor, credential_id, rpc, target, reason, idempotency_key, dry_run, outcome, message, before, after
FROM audit
WHERE (at, audit_id) < ($1, $2)
ORDER BY at DESC, audit_id DESC
LIMIT $3
