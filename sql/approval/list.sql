-- List approval requests, newest first.
SELECT approval_id, actor, rpc, target, reason, requested_at, expires_at, approved_by, approved_at, approve_reason, used_at
FROM approval
ORDER BY requested_at DESC, approval_id DESC
LIMIT $1
