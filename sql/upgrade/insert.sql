-- Insert an upgrade. The caller has locked the cluster.
INSERT INTO cluster_upgrade (upgrade_id, cluster_id, from_bundle, from_version, to_bundle, to_version, roll_out_id, release,
                             released, back, parallelism, deadline_seconds, created_at, created_by, reason,
                             requested_nodes)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $7::TEXT IS NULL, $9, $10, $11, clock_timestamp(), $12, $13, '{}')
