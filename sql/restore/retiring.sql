-- Machines on their way out whose provider was not told yet.
SELECT machine_id FROM machine_retirement
WHERE finished_at IS NULL AND release_ordered_at IS NULL
ORDER BY machine_id
