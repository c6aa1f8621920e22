-- What was to be replaced may have been, since.
UPDATE cluster_kubernetes SET rotate = '[]' WHERE rotate <> '[]'
