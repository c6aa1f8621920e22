DELETE FROM cluster_credential WHERE credential_id = ANY ($1)
