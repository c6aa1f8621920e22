-- Read a declaration as it is sent to the curators.
SELECT declaration FROM cluster_declaration WHERE cluster_id = $1 AND role = $2 AND withdrawn_at IS NULL
