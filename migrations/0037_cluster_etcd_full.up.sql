-- Since when a member of a cluster's etcd has had the alarm NOSPACE, as its curators last reported it. NULL: none has, or the
-- curators are of an earlier release.
ALTER TABLE cluster ADD COLUMN etcd_full_since TIMESTAMPTZ;
