SELECT revoked_at FROM access_credential WHERE credential_id = $1 FOR UPDATE
