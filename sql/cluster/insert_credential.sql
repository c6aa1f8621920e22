-- Insert a request for a certificate of a cluster. The caller has locked the cluster.
INSERT INTO cluster_credential (credential_id, cluster_id, public_key, holder, lifetime_seconds, requested_at, requested_by)
VALUES ($1, $2, $3, $4, $5, clock_timestamp(), $6)
