-- What was ordered of the provider is not taken back.
DELETE FROM machine_retirement
WHERE machine_id = $1 AND release_ordered_at IS NULL AND finished_at IS NULL
