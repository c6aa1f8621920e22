UPDATE approval
SET approved_by = $2, approver_credential_id = $3, approve_reason = $4, approved_at = clock_timestamp(),
    expires_at = clock_timestamp() + $5 * INTERVAL '1 millisecond'
WHERE approval_id = $1
RETURNING approved_at AS "approved_at!", expires_at
