UPDATE cluster_credential SET revoked_at = clock_timestamp()
WHERE credential_id = $1 AND revocation_requested_at IS NOT NULL
