ALTER TABLE machine_cluster DROP COLUMN services;
DROP TABLE cluster_declaration;
