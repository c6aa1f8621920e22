-- List the certificates for a cluster's API servers that were requested, newest first.
SELECT user_id, public_key, holder, access, lifetime_seconds, asked_at, asked_by, certificate, servers, api_servers,
       expires_at, refused
FROM cluster_kubernetes_user WHERE cluster_id = $1
ORDER BY asked_at DESC, user_id
