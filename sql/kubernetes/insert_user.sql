-- Insert a request for a certificate for API servers. The caller has locked the cluster.
INSERT INTO cluster_kubernetes_user (user_id, cluster_id, public_key, holder, access, lifetime_seconds, requested_at,
                                     requested_by)
VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp(), $7)
