ALTER TABLE cluster DROP COLUMN etcd_quota_bytes;
