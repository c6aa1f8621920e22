-- Size of the database file from which the etcd of a cluster accepts no writes, as its curators last reported it. NULL: they
-- never did, or are of an earlier release.
ALTER TABLE cluster ADD COLUMN etcd_quota_bytes INT8;
