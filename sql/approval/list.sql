-- List approval requests, newest first.
SELECT approval_id, actor, rpc, target, reason, asked_at, expires_at, approved_by, approved_at, approve_reason, used_at
FROM approval
ORDER BY asked_at DESC, approval_id DESC
LIMIT $1
