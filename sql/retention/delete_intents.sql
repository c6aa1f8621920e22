-- Delete intents that were resolved longer ago than the age limit. An open intent stays, however old it is:
-- what it may have done outside is still to find out. The array makes the DELETE go by key, and lock in its
-- order.
DELETE FROM intent i
WHERE i.intent_id = ANY (ARRAY(
    SELECT o.intent_id FROM intent o
    WHERE o.settled_at < now() - $1::INT8 * INTERVAL '1 millisecond'
    ORDER BY o.settled_at LIMIT $2))
