-- Delete the credentials of a cluster that is about to be deleted.
DELETE FROM cluster_credential WHERE cluster_id = $1
