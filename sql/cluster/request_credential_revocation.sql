UPDATE cluster_credential SET revocation_requested_at = clock_timestamp(), revocation_requested_by = $2
WHERE credential_id = $1 AND revocation_requested_at IS NULL
