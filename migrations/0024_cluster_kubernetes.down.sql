DROP TABLE cluster_upgrade;
DROP TABLE cluster_kubernetes_user;
ALTER TABLE artefact DROP COLUMN kubernetes;
ALTER TABLE machine_cluster DROP COLUMN kubernetes;
DROP TABLE cluster_kubernetes;
