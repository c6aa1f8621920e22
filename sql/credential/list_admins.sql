-- List the credentials that can approve an order now: those of admins for the whole fleet.
SELECT credential_id, name, created_at, expires_at, clock_timestamp() AS "now!"
FROM access_credential
WHERE role = 'admin' AND providers IS NULL AND revoked_at IS NULL
  AND (expires_at IS NULL OR expires_at > clock_timestamp())
ORDER BY credential_id
