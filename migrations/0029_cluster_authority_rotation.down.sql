ALTER TABLE cluster DROP COLUMN authority_rotation_progress;
ALTER TABLE cluster DROP COLUMN authority_rotation_step;
ALTER TABLE cluster DROP COLUMN authority_rotation_key;
ALTER TABLE cluster DROP COLUMN authority_rotation_from;
ALTER TABLE cluster DROP COLUMN authority_rotation_ordered_by;
ALTER TABLE cluster DROP COLUMN authority_rotation_ordered_at;
ALTER TABLE cluster DROP COLUMN authority_rotation;
