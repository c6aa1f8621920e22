-- Delete the declarations of a cluster that is about to be deleted.
DELETE FROM cluster_declaration WHERE cluster_id = $1
