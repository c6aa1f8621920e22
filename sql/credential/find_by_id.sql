-- Find a credential, and report whether it is valid at this moment.
SELECT credential_id, kind, name, role, providers, proof, created_at, created_by, expires_at, revoked_at, revoked_by,
       (revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())) AS "active!"
FROM access_credential
WHERE credential_id = $1
