-- Mark that a machine has to leave its cluster. If the cluster was made smaller ($4), the operator who did that decides
-- whether the authority of the cluster stays.
UPDATE machine_cluster
SET leaving = $3, keep_authority = $4::BOOL AND EXISTS (
    SELECT 1 FROM cluster k WHERE k.cluster_id = $2 AND k.keep_authority)
WHERE machine_id = $1 AND cluster_id = $2 AND leaving IS NULL
RETURNING machine_id
