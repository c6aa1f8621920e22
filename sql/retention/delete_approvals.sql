-- Delete the approval requests that are older than the age limit, by key as delete_audit.sql does.
DELETE FROM approval a
WHERE a.approval_id = ANY (ARRAY(
    SELECT o.approval_id FROM approval o
    WHERE o.requested_at < now() - $1::INT8 * INTERVAL '1 millisecond'
    ORDER BY o.requested_at, o.approval_id LIMIT $2))
