ALTER TABLE artefact DROP COLUMN signature;
