-- The keys that the Kubernetes Secrets of the cluster are encrypted with: their numbers and the stage of their rotation, and
-- none of their bytes, which are in sealed_secret. NULL: a cluster of a release that has no such keys.
ALTER TABLE cluster ADD COLUMN secret_keys JSONB;
-- How the machine encrypts Secrets, by its last report. NULL: its role server is of a release that does not.
ALTER TABLE machine_cluster_report ADD COLUMN secrets JSONB;
