-- A work item ends, and nobody wrote down what became of a step it took.
UPDATE intent
SET settled_at = clock_timestamp(), outcome = 'unknown: it was not written down'
WHERE machine_id = $1 AND session_id = $2 AND fence = $3 AND settled_at IS NULL
