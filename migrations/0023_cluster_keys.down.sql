-- Keys beside the one in force go. What their clusters know of them stays there: a release before this one asks nothing else
-- than for the key in force.
DELETE FROM sealed_secret WHERE name LIKE 'cluster/%/owner/%';
DROP TABLE cluster_former_key;
ALTER TABLE cluster DROP COLUMN key_since;
ALTER TABLE cluster DROP COLUMN key_asked_at;
ALTER TABLE cluster DROP COLUMN key_asked_by;
ALTER TABLE cluster DROP COLUMN key_next;
ALTER TABLE cluster DROP COLUMN key_next_at;
ALTER TABLE cluster DROP COLUMN keys_refused_since;
