ALTER TABLE machine_cluster_report DROP COLUMN secrets;
ALTER TABLE cluster DROP COLUMN secret_keys;
