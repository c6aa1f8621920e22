-- Queue every revocation of a cluster again. A cluster that was restored from a snapshot knows of no
-- revocation since.
UPDATE cluster_credential SET revoked_at = NULL WHERE cluster_id = $1 AND revoked_at IS NOT NULL
