-- Store the next key of a cluster. A rotation that is under way is completed first.
UPDATE cluster SET key_next = $2, key_next_at = clock_timestamp()
WHERE cluster_id = $1 AND key_next IS NULL AND deleting_at IS NULL
RETURNING cluster_id
