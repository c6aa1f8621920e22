-- Clear the requested key rotations: they may have been carried out since the backup.
UPDATE cluster_kubernetes SET rotate = '[]' WHERE rotate <> '[]'
