-- List the roles that were declared to a cluster.
SELECT role, digest, services, declared_at, declared_by, withdrawn_at
FROM cluster_declaration WHERE cluster_id = $1
ORDER BY role
