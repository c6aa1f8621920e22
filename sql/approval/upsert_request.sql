-- Insert an approval request, or renew one that has expired unused. A request that has not expired, or that
-- was used, stays as it is.
INSERT INTO approval (approval_id, actor, credential_id, idempotency_key, rpc, request, target, reason, requested_at,
                      expires_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, clock_timestamp(), clock_timestamp() + $9 * INTERVAL '1 millisecond')
ON CONFLICT (approval_id) DO UPDATE
SET rpc = EXCLUDED.rpc, request = EXCLUDED.request, target = EXCLUDED.target, reason = EXCLUDED.reason,
    requested_at = EXCLUDED.requested_at, expires_at = EXCLUDED.expires_at, approved_by = NULL, approver_credential_id = NULL, approved_at = NULL,
    approve_reason = NULL
WHERE approval.used_at IS NULL AND approval.expires_at <= clock_timestamp()
