-- A cluster that was brought back from a snapshot knows of no removal since: each key goes once more.
UPDATE cluster_former_key SET removed_at = NULL WHERE cluster_id = $1 AND removed_at IS NOT NULL
