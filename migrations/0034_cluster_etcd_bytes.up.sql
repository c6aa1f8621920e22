-- Size in bytes of the database file of a cluster's etcd, as its curators last reported it. NULL: they never did, or are of
-- an earlier release.
ALTER TABLE cluster ADD COLUMN etcd_bytes INT8;
