-- Queue the removal of every former key of a cluster again. A cluster that was restored from a snapshot knows
-- of no removal since.
UPDATE cluster_former_key SET removed_at = NULL WHERE cluster_id = $1 AND removed_at IS NOT NULL
