-- Make the next key of a cluster the one in force. An order that was given after that key was created
-- requests yet another key, so it stays.
UPDATE cluster SET key_since = clock_timestamp(), key_next = NULL, key_next_at = NULL, keys_refused_since = NULL,
    key_rotation_requested_at = CASE WHEN key_rotation_requested_at > key_next_at THEN key_rotation_requested_at END,
    key_rotation_requested_by = CASE WHEN key_rotation_requested_at > key_next_at THEN key_rotation_requested_by END
WHERE cluster_id = $1 AND key_next = $2
RETURNING cluster_id
