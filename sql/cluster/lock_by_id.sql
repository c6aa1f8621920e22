-- Nobody orders its restoration meanwhile; and from which snapshot it is being restored.
SELECT restoring_from FROM cluster WHERE cluster_id = $1 FOR UPDATE
