-- List the certificates that were requested from the curators of a cluster, newest first.
SELECT credential_id, public_key, holder, lifetime_seconds, asked_at, asked_by, certificate, serial, expires_at, refused,
    revoke_asked_at, revoke_asked_by, revoked_at
FROM cluster_credential WHERE cluster_id = $1
ORDER BY asked_at DESC, credential_id
