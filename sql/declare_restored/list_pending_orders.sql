-- Machines of which something was ordered that nobody was told of yet: a way out, other power.
SELECT machine_id AS "machine_id!" FROM machine_retirement
WHERE finished_at IS NULL AND release_ordered_at IS NULL
UNION
SELECT machine_id FROM machine_power_order
ORDER BY 1
