DELETE FROM artefact WHERE sha256 = $1
