-- List the machines with a pending order: a retirement whose release is not ordered yet, or a power order.
SELECT machine_id AS "machine_id!" FROM machine_retirement
WHERE finished_at IS NULL AND release_ordered_at IS NULL
UNION
SELECT machine_id FROM machine_power_order
ORDER BY 1
