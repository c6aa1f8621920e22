-- Orders that were given long ago; as intents are.
DELETE FROM audit a
WHERE a.audit_id = ANY (ARRAY(
    SELECT o.audit_id FROM audit o
    WHERE o.at < now() - $1::INT8 * INTERVAL '1 millisecond'
    ORDER BY o.at, o.audit_id LIMIT $2))
