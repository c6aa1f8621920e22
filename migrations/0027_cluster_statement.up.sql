-- The newest statement of a cluster's authority that a shepherd has verified, as curators send it, and its epoch and
-- number, which only increase. NULL: no curator has sent one yet.
ALTER TABLE cluster ADD COLUMN statement BYTEA;
ALTER TABLE cluster ADD COLUMN statement_epoch INT8;
ALTER TABLE cluster ADD COLUMN statement_number INT8;
