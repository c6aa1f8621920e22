ALTER TABLE cluster DROP COLUMN statement_number;
ALTER TABLE cluster DROP COLUMN statement_epoch;
ALTER TABLE cluster DROP COLUMN statement;
