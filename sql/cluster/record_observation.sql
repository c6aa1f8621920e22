-- Record what a pass observed: whether the cluster is in its desired state, what it waits for, and when its
-- curators last answered. Their absence counts only from when they were queried without a pause longer than
-- $7 milliseconds. Without their answer, $9 is NULL, and whether etcd is full stays as they last reported it.
UPDATE cluster SET polled_at = clock_timestamp(), wait_reasons = $2, settled = $6,
    observed_at = COALESCE($3::TIMESTAMPTZ, observed_at),
    unreachable_since = CASE WHEN $3::TIMESTAMPTZ IS NOT NULL THEN NULL
                             WHEN polled_at > clock_timestamp() - $7::INT8 * INTERVAL '1 millisecond'
                                 THEN COALESCE(unreachable_since, clock_timestamp())
                             ELSE clock_timestamp() END,
    voters = COALESCE($4, voters), voters_reached = COALESCE($5, voters_reached),
    etcd_bytes = COALESCE($8, etcd_bytes), etcd_quota_bytes = COALESCE($11::INT8, etcd_quota_bytes),
    etcd_full_since = CASE WHEN $9::BOOL IS NULL THEN etcd_full_since
                           WHEN $9::BOOL THEN COALESCE(etcd_full_since, clock_timestamp()) END,
    authority_replacements = COALESCE($10::INT8, authority_replacements)
WHERE cluster_id = $1
