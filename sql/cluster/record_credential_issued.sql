-- What its curators signed. One that is to be refused by now is written down all the same: by what it is known is how it is
-- refused.
UPDATE cluster_credential SET certificate = $2, serial = $3, expires_at = $4
WHERE credential_id = $1 AND certificate IS NULL
