ALTER TABLE cluster DROP COLUMN etcd_full_since;
