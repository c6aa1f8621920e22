UPDATE intent SET settled_at = clock_timestamp(), outcome = $2
WHERE intent_id = $1 AND settled_at IS NULL
RETURNING intent_id
