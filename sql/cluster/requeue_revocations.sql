-- A cluster that was brought back from a snapshot knows of no refusal since: each is asked for again.
UPDATE cluster_credential SET revoked_at = NULL WHERE cluster_id = $1 AND revoked_at IS NOT NULL
