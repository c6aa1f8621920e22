-- Compute the next generation of a cluster order: one more than any order that the machine ever had, as far
-- as this database or the machine knows.
SELECT GREATEST(
    COALESCE((SELECT generation FROM cluster_order WHERE machine_id = $1), 0),
    COALESCE((SELECT generation FROM machine_cluster_report WHERE machine_id = $1), 0)) + 1 AS "generation!"
