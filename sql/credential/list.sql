-- List credentials, newest first: their ids begin with the time.
SELECT credential_id, kind, name, role, providers, proof, created_at, created_by, expires_at, revoked_at, revoked_by,
       (revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())) AS "active!"
FROM access_credential
WHERE credential_id < $1
ORDER BY credential_id DESC
LIMIT $2
