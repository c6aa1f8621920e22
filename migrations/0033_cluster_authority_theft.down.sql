ALTER TABLE machine_cluster_report DROP COLUMN next_authority_step;
ALTER TABLE machine_cluster_report DROP COLUMN next_authority;
ALTER TABLE cluster DROP COLUMN authority_rotation_since;
ALTER TABLE cluster DROP COLUMN authority_rotation_certificate;
