UPDATE cluster_credential SET revoke_asked_at = clock_timestamp(), revoke_asked_by = $2
WHERE credential_id = $1 AND revoke_asked_at IS NULL
