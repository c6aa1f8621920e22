-- Of an order to replace the authority after a theft: the certificate of the new authority, and when the step of
-- `authority_rotation_step` began. NULL: the new authority is not made yet.
ALTER TABLE cluster ADD COLUMN authority_rotation_certificate BYTEA;
ALTER TABLE cluster ADD COLUMN authority_rotation_since TIMESTAMPTZ;

-- The certificate of the authority that replaces a stolen one on the machine, and the last step that the machine has taken.
ALTER TABLE machine_cluster_report ADD COLUMN next_authority BYTEA;
ALTER TABLE machine_cluster_report ADD COLUMN next_authority_step INT2;
