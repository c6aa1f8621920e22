-- The order to replace the authority of a cluster: `planned`, or `compromised` after a theft of its key. NULL: no such
-- order is carried out.
ALTER TABLE cluster ADD COLUMN authority_rotation TEXT;
ALTER TABLE cluster ADD COLUMN authority_rotation_ordered_at TIMESTAMPTZ;
ALTER TABLE cluster ADD COLUMN authority_rotation_ordered_by TEXT;
-- SHA-256 of the certificate of the authority that a planned order replaces. It is stored before the first call,
-- so that a shepherd that takes over does not replace the successor too. NULL: no call was made yet.
ALTER TABLE cluster ADD COLUMN authority_rotation_from BYTEA;
-- The sealed key of the new authority, and the last step that was done. A compromised order alone has them.
ALTER TABLE cluster ADD COLUMN authority_rotation_key BYTEA;
ALTER TABLE cluster ADD COLUMN authority_rotation_step INT2;
-- What the curators last reported of a replacement of the authority, also of one that nobody ordered. NULL: there is
-- none.
ALTER TABLE cluster ADD COLUMN authority_rotation_progress JSONB;
