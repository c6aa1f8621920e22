-- The shepherd's key as an owner of a cluster, and what becomes of it. The key in force is sealed under cluster/ID/owner in
-- sealed_secret, as ever; the one that is to take its place under cluster/ID/owner/next, and those that were in force
-- before under cluster/ID/owner/KEY, for as long as a snapshot may know nothing later.
ALTER TABLE cluster ADD COLUMN key_since TIMESTAMPTZ;
-- Somebody wants another key.
ALTER TABLE cluster ADD COLUMN key_asked_at TIMESTAMPTZ;
ALTER TABLE cluster ADD COLUMN key_asked_by TEXT;
-- The key that is to take its place, and since when it is there.
ALTER TABLE cluster ADD COLUMN key_next BYTEA;
ALTER TABLE cluster ADD COLUMN key_next_at TIMESTAMPTZ;
-- Since when its curators refuse every key that is here.
ALTER TABLE cluster ADD COLUMN keys_refused_since TIMESTAMPTZ;

CREATE TABLE cluster_former_key (
    cluster_id  UUID NOT NULL REFERENCES cluster (cluster_id),
    public_key  BYTEA NOT NULL CHECK (length(public_key) = 32),
    replaced_at TIMESTAMPTZ NOT NULL,
    -- When its curators were told to refuse it.
    removed_at  TIMESTAMPTZ,
    PRIMARY KEY (cluster_id, public_key)
);
