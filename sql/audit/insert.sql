-- No row comes back when the same actor's same key was used meanwhile: then all of this is done anew, and
-- finds that.
INSERT INTO audit (audit_id, at, actor, credential_id, rpc, target, machine_id, reason, idempotency_key,
                   request, dry_run, outcome, said, before, after)
VALUES ($1, clock_timestamp(), $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)
ON CONFLICT (actor, idempotency_key) WHERE idempotency_key IS NOT NULL AND NOT dry_run DO NOTHING
RETURNING at
