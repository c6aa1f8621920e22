-- Insert or update the desired Kubernetes of a cluster. The caller has locked the cluster.
INSERT INTO cluster_kubernetes (cluster_id, bundle, version, service_range, pod_range, node_prefix, domain, add_ons, storage,
                                requested_at, requested_by, rotate)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, clock_timestamp(), $10, '[]')
ON CONFLICT (cluster_id) DO UPDATE SET bundle = excluded.bundle, version = excluded.version, add_ons = excluded.add_ons,
    storage = excluded.storage
