-- How often the authority of the cluster was replaced since the first one that its shepherds trust, by its newest statement.
-- NULL: there is none yet.
ALTER TABLE cluster ADD COLUMN authority_replacements INT8;
