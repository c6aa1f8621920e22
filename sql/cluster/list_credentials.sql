-- List the certificates that were requested from the curators of a cluster, newest first.
SELECT credential_id, public_key, holder, lifetime_seconds, requested_at, requested_by, certificate, serial,
    expires_at, refused, revocation_requested_at, revocation_requested_by, revoked_at
FROM cluster_credential WHERE cluster_id = $1
ORDER BY requested_at DESC, credential_id
