-- Read the state of a machine's cluster, and of its other members, that decides whether the machine may be
-- disrupted.
SELECT c.health, c.voter, c.leaving, k.deleting_at IS NOT NULL AS "deleting!", k.founded_at IS NOT NULL AS "founded!",
       k.observed_at, k.voters, k.voters_reached,
       (SELECT COALESCE(p.provider_id, o.machine_id::TEXT)
        FROM machine_cluster o
        JOIN machine_recovery y ON y.machine_id = o.machine_id
        LEFT JOIN machine_provided p ON p.machine_id = o.machine_id
        WHERE o.cluster_id = c.cluster_id AND o.machine_id <> c.machine_id AND y.acted_at IS NOT NULL
        ORDER BY o.machine_id LIMIT 1) AS disturbed
FROM machine_cluster c JOIN cluster k ON k.cluster_id = c.cluster_id
WHERE c.machine_id = $1
