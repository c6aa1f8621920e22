-- Resolve as unknown the open intents of a work item that ends and that recorded no outcome for them.
UPDATE intent
SET settled_at = clock_timestamp(), outcome = 'unknown: it was not written down'
WHERE machine_id = $1 AND session_id = $2 AND fence = $3 AND settled_at IS NULL
