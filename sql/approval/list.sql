-- List a page of approval requests, newest first: those before a moment and an id.
SELECT approval_id, actor, rpc, target, reason, requested_at, expires_at, approved_by, approved_at, approve_reason, used_at
FROM approval
WHERE (requested_at, approval_id) < ($1, $2)
ORDER BY requested_at DESC, approval_id DESC
LIMIT $3
