ALTER TABLE cluster DROP COLUMN authority_replacements;
