-- List audit rows of one machine, as list.sql does for all machines.
SELECT c.audit_id, c.at, c.actor, c.credential_id, c.rpc, c.target, c.reason, c.idempotency_key, c.dry_run, c.outcome,
       c.message, c.before, c.after
FROM (
    SELECT audit_id, at, actor, credential_id, rpc, target, reason, idempotency_key, dry_run, outcome, message, before,
           after
    FROM audit
    WHERE machine_id = $8 AND at <= $1 AND (at, audit_id) < ($1, $2) AND at >= $5
    ORDER BY at DESC, audit_id DESC
    LIMIT $4) c
WHERE ($6::TEXT = '' OR left(c.actor, length($6::TEXT) + 1) IN ($6::TEXT, $6::TEXT || '@', $6::TEXT || ' '))
  AND ($7::TEXT = '' OR lower(c.rpc) = $7::TEXT OR strpos(lower(c.rpc), '.' || $7::TEXT || '/') > 0
       OR right(lower(c.rpc), length($7::TEXT) + 1) IN ('.' || $7::TEXT, '/' || $7::TEXT))
ORDER BY c.at DESC, c.audit_id DESC
LIMIT $3
