ALTER TABLE cluster DROP COLUMN etcd_bytes;
