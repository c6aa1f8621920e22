-- A role of a cluster whose declaration names this digest, which is $1 as it is written there.
SELECT c.name, d.role
FROM cluster_declaration d JOIN cluster c USING (cluster_id)
WHERE d.withdrawn_at IS NULL AND position($1::BYTEA IN d.declaration) > 0
ORDER BY c.name, d.role
LIMIT 1
