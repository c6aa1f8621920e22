-- Read the desired Kubernetes of a cluster, and what its curators last reported.
SELECT bundle, version, service_range, pod_range, node_prefix, domain, add_ons, storage, requested_at, requested_by,
       removing_by, rotate, observed
FROM cluster_kubernetes WHERE cluster_id = $1
