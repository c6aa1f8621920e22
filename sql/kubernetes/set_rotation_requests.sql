-- Set the requested key rotations, as long as no curator has received them.
UPDATE cluster_kubernetes SET rotate = $2 WHERE cluster_id = $1
