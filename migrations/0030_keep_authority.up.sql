-- Whether the authority of a cluster stays when a machine of its control plane leaves it: by the last order that set the
-- size of the control plane, by the order that retires a machine, and for a machine that is leaving.
ALTER TABLE cluster ADD COLUMN keep_authority BOOL NOT NULL DEFAULT FALSE;
ALTER TABLE machine_retirement ADD COLUMN keep_authority BOOL NOT NULL DEFAULT FALSE;
ALTER TABLE machine_cluster ADD COLUMN keep_authority BOOL NOT NULL DEFAULT FALSE;
-- SHA-256 of the certificate of the authority that signed when the snapshot was taken. NULL: an earlier release took it.
ALTER TABLE cluster_snapshot ADD COLUMN authority BYTEA;
