-- Set the leave time of a machine's nodes to now, because the machine is no longer a member of the cluster.
UPDATE cluster_left_node SET left_at = clock_timestamp() WHERE machine_id = $1 AND cluster_id = $2
