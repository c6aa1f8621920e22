-- Snapshots of clusters' records. What was taken stands in the chunks of a snapshot, sealed as one and then cut: the key
-- of the cluster's authority is in it. `voters` are the nodes whose members voted in etcd then.
CREATE TABLE cluster_snapshot (
    snapshot_id UUID PRIMARY KEY,
    cluster_id  UUID NOT NULL REFERENCES cluster (cluster_id),
    taken_at    TIMESTAMPTZ NOT NULL,
    why         TEXT NOT NULL,
    revision    INT8 NOT NULL,
    epoch       INT8 NOT NULL,
    bytes       INT8 NOT NULL,
    nodes       INT8 NOT NULL,
    members     INT8 NOT NULL,
    voters      JSONB NOT NULL,
    digest      BYTEA NOT NULL CHECK (length(digest) = 32)
);
CREATE INDEX cluster_snapshot_by_cluster ON cluster_snapshot (cluster_id, taken_at DESC);

CREATE TABLE cluster_snapshot_chunk (
    snapshot_id UUID NOT NULL REFERENCES cluster_snapshot (snapshot_id),
    number      INT8 NOT NULL,
    sealed      BYTEA NOT NULL,
    PRIMARY KEY (snapshot_id, number)
);

-- When a person last asked for one.
ALTER TABLE cluster ADD COLUMN snapshot_asked_at TIMESTAMPTZ;
