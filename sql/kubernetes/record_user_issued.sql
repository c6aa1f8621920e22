UPDATE cluster_kubernetes_user SET certificate = $2, servers = $3, api_servers = $4, expires_at = $5
WHERE user_id = $1 AND certificate IS NULL
