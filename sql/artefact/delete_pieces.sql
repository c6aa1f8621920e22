DELETE FROM artefact_chunk WHERE sha256 = $1
