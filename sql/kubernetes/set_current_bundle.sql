-- What all of its nodes run by now is what it is to run.
UPDATE cluster_kubernetes SET bundle = $2, version = $3 WHERE cluster_id = $1
