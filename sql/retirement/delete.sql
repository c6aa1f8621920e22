-- Delete a retirement. One whose release was ordered from the provider, or that is finished, stays.
DELETE FROM machine_retirement
WHERE machine_id = $1 AND release_ordered_at IS NULL AND finished_at IS NULL
