-- Insert an audit row. No row is returned when an order of the same actor with the same idempotency key was
-- recorded meanwhile. The caller then repeats the whole transaction, which finds that order.
INSERT INTO audit (audit_id, at, actor, credential_id, rpc, target, machine_id, reason, idempotency_key,
                   request, dry_run, outcome, message, before, after)
VALUES ($1, clock_timestamp(), $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)
ON CONFLICT (actor, idempotency_key) WHERE idempotency_key IS NOT NULL AND NOT dry_run DO NOTHING
RETURNING at
