DELETE FROM cluster_kubernetes_user WHERE user_id = ANY ($1)
