-- Keys of nodes that left a cluster, for as long as it has snapshots from before that: one that is restored brings them
-- back, and then they have to leave again.
CREATE TABLE cluster_left_node (
    cluster_id UUID NOT NULL REFERENCES cluster (cluster_id),
    node_key   BYTEA NOT NULL CHECK (length(node_key) = 32),
    machine_id UUID NOT NULL,
    left_at    TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (cluster_id, node_key)
);

-- Since when its curators have been asked without any pause, and not answered.
ALTER TABLE cluster ADD COLUMN away_since TIMESTAMPTZ;
