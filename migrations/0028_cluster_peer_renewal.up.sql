-- When an operator ordered new certificates for the members of a cluster's etcd, and which operator. NULL: no such
-- order is carried out.
ALTER TABLE cluster ADD COLUMN peer_renewal_requested_at TIMESTAMPTZ;
ALTER TABLE cluster ADD COLUMN peer_renewal_requested_by TEXT;
