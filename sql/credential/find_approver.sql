-- Find when a credential was created, if it is valid now.
SELECT created_at
FROM access_credential
WHERE credential_id = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())
