UPDATE artefact SET name = $2 WHERE sha256 = $1 AND added_at IS NOT NULL
