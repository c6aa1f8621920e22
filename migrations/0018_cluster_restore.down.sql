ALTER TABLE machine_cluster_report DROP COLUMN epoch;
ALTER TABLE cluster DROP COLUMN restoring_from;
ALTER TABLE cluster DROP COLUMN restoring_onto;
ALTER TABLE cluster DROP COLUMN restoring_by;
ALTER TABLE cluster DROP COLUMN restoring_since;
ALTER TABLE cluster DROP COLUMN restored_at;
ALTER TABLE cluster DROP COLUMN epoch;
