ALTER TABLE machine_retirement DROP COLUMN listed_since;
ALTER TABLE machine_retirement DROP COLUMN outcome;
ALTER TABLE machine_retirement DROP COLUMN release_intent;
ALTER TABLE machine_retirement DROP COLUMN release_ordered_at;
ALTER TABLE machine_retirement DROP COLUMN wipe_waived_by;
ALTER TABLE machine_retirement DROP COLUMN wipe_waived_at;
ALTER TABLE machine_retirement DROP COLUMN wipe;
ALTER TABLE machine_retirement DROP COLUMN requested_by;
