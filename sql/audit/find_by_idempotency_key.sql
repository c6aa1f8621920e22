-- Find the recorded outcome of an earlier order of this actor with this idempotency key.
SELECT audit_id, request, outcome, message, before, after
FROM audit
WHERE actor = $1 AND idempotency_key = $2 AND NOT dry_run
