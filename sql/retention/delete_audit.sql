-- Delete the audit rows of orders that are older than the age limit, by key as delete_intents.sql does.
DELETE FROM audit a
WHERE a.audit_id = ANY (ARRAY(
    SELECT o.audit_id FROM audit o
    WHERE o.at < now() - $1::INT8 * INTERVAL '1 millisecond'
    ORDER BY o.at, o.audit_id LIMIT $2))
