-- End the planned order to replace a cluster's authority, and request a snapshot that has the new one. An order after a
-- theft that took its place meanwhile stays.
UPDATE cluster
SET authority_rotation = NULL,
    authority_rotation_ordered_at = NULL,
    authority_rotation_ordered_by = NULL,
    authority_rotation_from = NULL,
    snapshot_requested_at = clock_timestamp()
WHERE cluster_id = $1 AND authority_rotation = 'planned'
