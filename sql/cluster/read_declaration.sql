-- A declaration as it is put to the curators.
SELECT declaration FROM cluster_declaration WHERE cluster_id = $1 AND role = $2 AND withdrawn_at IS NULL
