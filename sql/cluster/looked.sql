-- What a pass found: whether the cluster is as it is to be, what it waits for, and when its curators last answered.
UPDATE cluster SET looked_at = clock_timestamp(), waits = $2, settled = $6,
    seen_at = CASE WHEN $3 THEN clock_timestamp() ELSE seen_at END,
    voters = COALESCE($4, voters), voters_reached = COALESCE($5, voters_reached)
WHERE cluster_id = $1
