UPDATE machine_cluster SET leaving = $3 WHERE machine_id = $1 AND cluster_id = $2 AND leaving IS NULL
RETURNING machine_id
