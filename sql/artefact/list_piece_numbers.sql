-- List the numbers of the stored pieces of an artefact.
SELECT number FROM artefact_chunk WHERE sha256 = $1 ORDER BY number
