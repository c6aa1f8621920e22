-- Read the highest fence that a machine's agent reported while this database had issued none as high, and the
-- highest fence that it has issued since. crates/model/src/unknown_fence.rs decides whether that still proves
-- anything.
SELECT h.at, h.fence AS "fence!", d.fence AS issued_fence
FROM machine_due d
JOIN history h ON h.machine_id = d.machine_id
WHERE d.machine_id = $1 AND d.lane = 'access' AND h.event = 'NewerFence' AND h.fence IS NOT NULL
ORDER BY h.fence DESC
LIMIT 1
