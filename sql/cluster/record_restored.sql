-- Record that a cluster is restored and which curators it has. An order to replace its authority begins again: the
-- snapshot may be of before its replacement.
UPDATE cluster SET restored_at = clock_timestamp(), curators = $2, restoring_since = NULL, restoring_from = NULL,
    restoring_onto = NULL, restoring_by = NULL, observed_at = NULL, unreachable_since = NULL,
    voters = NULL, voters_reached = NULL, authority_rotation_from = NULL, authority_rotation_progress = NULL
WHERE cluster_id = $1 AND restoring_since IS NOT NULL
RETURNING cluster_id
