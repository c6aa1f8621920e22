-- What became of an order before.
SELECT audit_id, request, outcome, said, before, after
FROM audit
WHERE actor = $1 AND idempotency_key = $2 AND NOT dry_run
