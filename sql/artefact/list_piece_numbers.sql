-- Which pieces are there.
SELECT number FROM artefact_chunk WHERE sha256 = $1 ORDER BY number
