ALTER TABLE cluster DROP COLUMN peer_renewal_requested_by;
ALTER TABLE cluster DROP COLUMN peer_renewal_requested_at;
