DELETE FROM cluster_former_key WHERE cluster_id = $1
