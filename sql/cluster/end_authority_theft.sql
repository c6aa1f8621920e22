-- End the order to replace a stolen authority, and request a snapshot of the cluster as every node sees it now.
UPDATE cluster
SET authority_rotation = NULL,
    authority_rotation_ordered_at = NULL,
    authority_rotation_ordered_by = NULL,
    authority_rotation_key = NULL,
    authority_rotation_step = NULL,
    authority_rotation_certificate = NULL,
    authority_rotation_since = NULL,
    authority_rotation_progress = NULL,
    snapshot_requested_at = clock_timestamp()
WHERE cluster_id = $1 AND authority_rotation = 'compromised' AND authority_rotation_step = 6
