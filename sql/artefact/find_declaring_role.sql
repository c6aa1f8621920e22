-- Find a role of a cluster whose declaration names this digest. $1 is the digest in the form that
-- declarations contain.
SELECT c.name, d.role
FROM cluster_declaration d JOIN cluster c USING (cluster_id)
WHERE d.withdrawn_at IS NULL AND position($1::BYTEA IN d.declaration) > 0
ORDER BY c.name, d.role
LIMIT 1
