-- Lock an approval request until the end of this transaction, and report whether the credentials of its requester and
-- of its approver are still valid. Who acted without a credential has none to lose, so it counts as valid.
SELECT a.approval_id, a.actor, a.credential_id, a.rpc, a.request, a.target, a.reason, a.requested_at, a.expires_at,
       a.approved_by, a.approved_at, a.approve_reason, a.used_at,
       (SELECT c.name FROM access_credential c WHERE c.credential_id = a.credential_id) AS credential_name,
       (a.credential_id IS NULL OR EXISTS (
           SELECT 1 FROM access_credential c
           WHERE c.credential_id = a.credential_id AND c.revoked_at IS NULL
             AND (c.expires_at IS NULL OR c.expires_at > clock_timestamp()))) AS "good!",
       (a.approver_credential_id IS NULL OR EXISTS (
           SELECT 1 FROM access_credential c
           WHERE c.credential_id = a.approver_credential_id AND c.revoked_at IS NULL
             AND (c.expires_at IS NULL OR c.expires_at > clock_timestamp()))) AS "approver_good!",
       clock_timestamp() AS "now!"
FROM approval a
WHERE a.approval_id = $1
FOR UPDATE
