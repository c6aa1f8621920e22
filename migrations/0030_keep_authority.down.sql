ALTER TABLE cluster_snapshot DROP COLUMN authority;
ALTER TABLE machine_cluster DROP COLUMN keep_authority;
ALTER TABLE machine_retirement DROP COLUMN keep_authority;
ALTER TABLE cluster DROP COLUMN keep_authority;
