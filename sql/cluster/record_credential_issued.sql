-- Record the certificate that the curators of a cluster signed. A certificate whose revocation is requested
-- by now is recorded all the same, because the revocation uses its serial number.
UPDATE cluster_credential SET certificate = $2, serial = $3, expires_at = $4
WHERE credential_id = $1 AND certificate IS NULL
