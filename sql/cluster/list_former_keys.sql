-- List the keys of the shepherd that were in force before for a cluster, newest first.
SELECT public_key, replaced_at, removed_at FROM cluster_former_key WHERE cluster_id = $1
ORDER BY replaced_at DESC, public_key
