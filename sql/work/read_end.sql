-- Read how a work item ended, if it did.
SELECT event, session_id FROM history
WHERE machine_id = $1 AND lane = $2 AND fence = $3 AND edge = 'end'
