-- Approve the node key that a machine reports now, and no other one.
UPDATE machine_cluster c SET approved = r.node_key
FROM machine_cluster_report r
WHERE c.machine_id = $1 AND c.cluster_id = $2 AND r.machine_id = c.machine_id AND r.node_key IS NOT NULL
RETURNING r.node_key AS "key!"
