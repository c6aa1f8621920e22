-- List the certificates for a cluster's API servers that were requested, newest first.
SELECT user_id, public_key, holder, access, lifetime_seconds, requested_at, requested_by, certificate, servers, api_servers,
       expires_at, refused
FROM cluster_kubernetes_user WHERE cluster_id = $1
ORDER BY requested_at DESC, user_id
