-- How it ended is told once: what comes later found it over.
UPDATE machine_retirement SET finished_at = clock_timestamp(), outcome = $2
WHERE machine_id = $1 AND finished_at IS NULL
