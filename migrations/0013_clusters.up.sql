-- Clusters that operators asked for. What is wanted is in the first columns, what became of it in the others. A row goes
-- when the last of its machines has left.
CREATE TABLE cluster (
    cluster_id     UUID PRIMARY KEY,
    name           TEXT NOT NULL UNIQUE,
    control_plane  INT8 NOT NULL,
    workers        INT8 NOT NULL,
    selector       TEXT NOT NULL,
    roles          JSONB NOT NULL,
    approval       TEXT NOT NULL,
    version        INT8 NOT NULL,
    created_at     TIMESTAMPTZ NOT NULL,
    created_by     TEXT NOT NULL,
    deleting_at    TIMESTAMPTZ,
    deleting_by    TEXT,
    founded_at     TIMESTAMPTZ,
    ca_certificate BYTEA,
    curators       JSONB,
    looked_at      TIMESTAMPTZ,
    seen_at        TIMESTAMPTZ,
    waits          JSONB NOT NULL,
    settled        BOOL NOT NULL,
    voters         INT8,
    voters_reached INT8,
    CHECK ((founded_at IS NULL) = (ca_certificate IS NULL) AND (founded_at IS NULL) = (curators IS NULL))
);

-- A machine belongs to one cluster at most. `approved` is the key that a person let in; `health` is what the curator that leads said at `seen_at`.
CREATE TABLE machine_cluster (
    machine_id UUID PRIMARY KEY REFERENCES machine (machine_id),
    cluster_id UUID NOT NULL REFERENCES cluster (cluster_id),
    part       TEXT NOT NULL,
    chosen_at  TIMESTAMPTZ NOT NULL,
    leaving    TEXT,
    approved   BYTEA,
    waits      TEXT,
    node_id    TEXT,
    node_state TEXT,
    roles      JSONB,
    health     TEXT,
    voter      BOOL,
    seen_at    TIMESTAMPTZ
);
CREATE INDEX machine_cluster_by_cluster ON machine_cluster (cluster_id);

-- Where a machine stands with clusters, as its agent said last.
CREATE TABLE machine_cluster_report (
    machine_id     UUID PRIMARY KEY REFERENCES machine (machine_id),
    generation     INT8 NOT NULL,
    node_key       BYTEA CHECK (length(node_key) = 32),
    ca_certificate BYTEA,
    address        TEXT,
    error          TEXT,
    reported_at    TIMESTAMPTZ NOT NULL
);

-- What a machine was asked last about clusters; sealed, because it can hold a ticket. The number outlives the membership:
-- a machine passes over every order that is not newer than the one it has. Without a sealed order nothing is asked.
CREATE TABLE cluster_order (
    machine_id UUID PRIMARY KEY REFERENCES machine (machine_id),
    generation INT8 NOT NULL,
    what       TEXT NOT NULL,
    sealed     BYTEA,
    ordered_at TIMESTAMPTZ NOT NULL
);
