-- Record the key of a machine's node that leaves its cluster, while the machine's agent still reports it.
INSERT INTO cluster_left_node (cluster_id, node_key, machine_id, left_at)
SELECT $2, r.node_key, r.machine_id, clock_timestamp()
FROM machine_cluster_report r
WHERE r.machine_id = $1 AND r.node_key IS NOT NULL
ON CONFLICT (cluster_id, node_key) DO UPDATE SET left_at = excluded.left_at
