-- Read the desired Kubernetes of a cluster, and what its curators last reported.
SELECT bundle, version, service_range, pod_range, node_prefix, domain, add_ons, storage, asked_at, asked_by, removing_by,
       rotate, known
FROM cluster_kubernetes WHERE cluster_id = $1
