UPDATE access_credential SET revoked_at = clock_timestamp(), revoked_by = $2
WHERE credential_id = $1 AND revoked_at IS NULL
