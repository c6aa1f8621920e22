UPDATE machine_retirement SET release_ordered_at = clock_timestamp(), release_intent = $2
WHERE machine_id = $1 AND release_ordered_at IS NULL AND finished_at IS NULL
