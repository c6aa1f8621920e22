UPDATE cluster_credential SET refused = $2 WHERE credential_id = $1 AND certificate IS NULL
