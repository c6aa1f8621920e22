SELECT node_key FROM cluster_left_node WHERE cluster_id = $1
