-- Record how a retirement ended. The first outcome stays, because a later one finds the retirement finished.
UPDATE machine_retirement SET finished_at = clock_timestamp(), outcome = $2
WHERE machine_id = $1 AND finished_at IS NULL
