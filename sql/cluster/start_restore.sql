-- Start the restore of a cluster from this snapshot.
UPDATE cluster SET restoring_since = clock_timestamp(), restoring_from = $2, restoring_onto = $3, restoring_by = $4,
    settled = FALSE, version = version + 1
WHERE cluster_id = $1
