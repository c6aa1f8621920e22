-- A machine is of its cluster no more: the time of its nodes' leaving counts from now.
UPDATE cluster_left_node SET left_at = clock_timestamp() WHERE machine_id = $1 AND cluster_id = $2
