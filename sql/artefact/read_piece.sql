SELECT bytes FROM artefact_chunk WHERE sha256 = $1 AND number = $2
