-- The signature of an artefact, as minisign wrote it. A shepherd has verified it. NULL: the artefact is not signed.
ALTER TABLE artefact ADD COLUMN signature TEXT;
