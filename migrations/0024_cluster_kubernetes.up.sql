-- What clusters are to run of Kubernetes: what is wanted, what is to be replaced as long as no curator was told, and what
-- curators said last. A row goes when it is to go and no curator has it any more.
CREATE TABLE cluster_kubernetes (
    cluster_id    UUID PRIMARY KEY REFERENCES cluster (cluster_id),
    bundle        BYTEA NOT NULL CHECK (length(bundle) = 32),
    version       TEXT NOT NULL,
    service_range TEXT NOT NULL,
    pod_range     TEXT NOT NULL,
    node_prefix   INT8 NOT NULL,
    domain        TEXT NOT NULL,
    add_ons       JSONB NOT NULL,
    storage       JSONB,
    asked_at      TIMESTAMPTZ NOT NULL,
    asked_by      TEXT NOT NULL,
    removing_by   TEXT,
    rotate        JSONB NOT NULL,
    known         JSONB
);

-- What a node runs of it, as it said last.
ALTER TABLE machine_cluster ADD COLUMN kubernetes JSONB;

-- The version of Kubernetes in an artefact that is a bundle of it.
ALTER TABLE artefact ADD COLUMN kubernetes TEXT;

-- Certificates for API servers that people asked for. The key is theirs: what comes here is its public half.
CREATE TABLE cluster_kubernetes_user (
    user_id          UUID PRIMARY KEY,
    cluster_id       UUID NOT NULL REFERENCES cluster (cluster_id),
    public_key       BYTEA NOT NULL,
    holder           TEXT NOT NULL,
    access           TEXT NOT NULL,
    lifetime_seconds INT8 NOT NULL,
    asked_at         TIMESTAMPTZ NOT NULL,
    asked_by         TEXT NOT NULL,
    certificate      BYTEA,
    servers          JSONB,
    api_servers      JSONB,
    expires_at       TIMESTAMPTZ,
    refused          TEXT,
    CHECK ((certificate IS NULL) = (servers IS NULL) AND (servers IS NULL) = (api_servers IS NULL)
        AND (api_servers IS NULL) = (expires_at IS NULL))
);
CREATE UNIQUE INDEX cluster_kubernetes_user_by_key ON cluster_kubernetes_user (cluster_id, public_key);

-- Upgrades of clusters: from which bundle to which, after which roll-out of role servers, and which nodes were asked on the
-- way that it goes now. One that has a reason to stand still is paused until an operator resumes it.
CREATE TABLE cluster_upgrade (
    upgrade_id       TEXT PRIMARY KEY,
    cluster_id       UUID NOT NULL REFERENCES cluster (cluster_id),
    from_bundle      BYTEA CHECK (length(from_bundle) = 32),
    from_version     TEXT,
    to_bundle        BYTEA CHECK (length(to_bundle) = 32),
    to_version       TEXT,
    roll_out_id      TEXT,
    release          TEXT,
    released         BOOL NOT NULL,
    back             BOOL NOT NULL,
    parallelism      INT8 NOT NULL,
    deadline_seconds INT8 NOT NULL,
    created_at       TIMESTAMPTZ NOT NULL,
    created_by       TEXT NOT NULL,
    reason           TEXT NOT NULL,
    paused           TEXT,
    ended_at         TIMESTAMPTZ,
    ended            TEXT,
    asked            JSONB NOT NULL,
    CHECK ((ended_at IS NULL) = (ended IS NULL)),
    CHECK ((from_bundle IS NULL) = (to_bundle IS NULL) AND (from_bundle IS NULL) = (from_version IS NULL)
        AND (to_bundle IS NULL) = (to_version IS NULL))
);
-- Of one cluster one at a time.
CREATE UNIQUE INDEX cluster_upgrade_active ON cluster_upgrade (cluster_id) WHERE ended_at IS NULL;
CREATE INDEX cluster_upgrade_by_cluster ON cluster_upgrade (cluster_id);
