-- Find a certificate by its fingerprint, which is no secret, as find_by_id.sql finds a credential by its id.
SELECT credential_id, kind, name, role, providers, proof, created_at, created_by, expires_at, revoked_at, revoked_by,
       (revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())) AS "active!"
FROM access_credential
WHERE proof = $1 AND kind = 'certificate'
