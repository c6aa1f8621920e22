UPDATE cluster_kubernetes_user SET refused = $2 WHERE user_id = $1 AND certificate IS NULL
