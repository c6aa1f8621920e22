DELETE FROM machine_cluster WHERE machine_id = $1 AND cluster_id = $2 RETURNING machine_id
