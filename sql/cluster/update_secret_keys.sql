-- Store the next state of the keys of a cluster's Secrets, if the state is still the one that it follows from.
UPDATE cluster SET secret_keys = $2
WHERE cluster_id = $1 AND secret_keys IS NOT DISTINCT FROM $3 AND deleting_at IS NULL
RETURNING cluster_id
