-- Record that a cluster is restored and which curators it has. An order to replace its authority begins again: the
-- snapshot may be of before its replacement. After a theft, that is so until the last step: from then on, only
-- snapshots with the new authority are restored.
UPDATE cluster SET restored_at = clock_timestamp(), curators = $2, restoring_since = NULL, restoring_from = NULL,
    restoring_onto = NULL, restoring_by = NULL, restoring_with_image = FALSE, observed_at = NULL, unreachable_since = NULL,
    voters = NULL, voters_reached = NULL, authority_rotation_from = NULL, authority_rotation_progress = NULL,
    authority_rotation_key = NULL, etcd_full_since = NULL,
    authority_rotation_step = CASE WHEN authority_rotation_step = 6 THEN authority_rotation_step END,
    authority_rotation_certificate = CASE WHEN authority_rotation_step = 6 THEN authority_rotation_certificate END,
    authority_rotation_since = CASE WHEN authority_rotation_step = 6 THEN clock_timestamp() END
WHERE cluster_id = $1 AND restoring_since IS NOT NULL
RETURNING cluster_id
