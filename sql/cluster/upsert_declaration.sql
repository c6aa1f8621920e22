-- Insert or replace the declaration of a role. The caller has locked the cluster.
INSERT INTO cluster_declaration (cluster_id, role, declaration, digest, services, declared_at, declared_by)
VALUES ($1, $2, $3, $4, $5, clock_timestamp(), $6)
ON CONFLICT (cluster_id, role) DO UPDATE SET declaration = excluded.declaration, digest = excluded.digest,
    services = excluded.services, declared_at = excluded.declared_at, declared_by = excluded.declared_by,
    withdrawn_at = NULL
