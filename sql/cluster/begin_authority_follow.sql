-- Record that a cluster's records have the authority that replaces the stolen one. From now on the shepherds trust it alone,
-- with its statements, and the epoch ($2) and the curators ($3) that the machines of the control plane report: others may be
-- those of the thief. NULL: nothing is known of the curators.
-- The key is forgotten, and a snapshot is requested that has it.
UPDATE cluster
SET ca_certificate = authority_rotation_certificate,
    statement = NULL,
    statement_epoch = NULL,
    statement_number = NULL,
    epoch = $2,
    curators = COALESCE($3, curators),
    authority_rotation_key = NULL,
    authority_rotation_step = 6,
    authority_rotation_since = clock_timestamp(),
    snapshot_requested_at = clock_timestamp()
WHERE cluster_id = $1 AND authority_rotation = 'compromised' AND authority_rotation_step = 5
