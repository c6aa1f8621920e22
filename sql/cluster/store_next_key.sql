-- One that is on its way is brought to its end first.
UPDATE cluster SET key_next = $2, key_next_at = clock_timestamp()
WHERE cluster_id = $1 AND key_next IS NULL AND deleting_at IS NULL
RETURNING cluster_id
