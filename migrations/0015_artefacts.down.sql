DROP TABLE artefact_chunk;
DROP TABLE artefact;
