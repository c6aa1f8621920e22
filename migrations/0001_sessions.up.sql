-- Who works: leases that their owners keep alive, and what hangs off them.

-- One lease of the right to work. Expiry is an event: the committed update of closed_at. `deadline`
-- is in no index, so that a renewal is a heap-only update.
CREATE TABLE session (
    session_id   UUID PRIMARY KEY,
    process_id   UUID NOT NULL,
    component    TEXT NOT NULL,
    runtime_info JSONB NOT NULL,
    interval_ms  INT8 NOT NULL CHECK (interval_ms > 0),
    started_at   TIMESTAMPTZ NOT NULL,
    deadline     TIMESTAMPTZ NOT NULL,
    closed_at    TIMESTAMPTZ,
    close_reason TEXT
);
CREATE INDEX session_open ON session (session_id) WHERE closed_at IS NULL;
CREATE INDEX session_closed ON session (closed_at) WHERE closed_at IS NOT NULL;

-- The right to one named thing that is no machine: a provider's provisioner, a cluster.
CREATE TABLE named_lease (
    kind          TEXT NOT NULL,
    name          TEXT NOT NULL,
    lease_session UUID,
    fence         INT8 NOT NULL,
    taken_at      TIMESTAMPTZ,
    PRIMARY KEY (kind, name)
);
CREATE INDEX named_lease_by_session ON named_lease (lease_session) WHERE lease_session IS NOT NULL;

-- The rules the fleet is run by. The spans that statements compare with are repeated as columns;
-- the same write sets both.
CREATE TABLE policy (
    singleton                  BOOL PRIMARY KEY CHECK (singleton),
    version                    INT8 NOT NULL,
    document                   JSONB NOT NULL,
    first_heartbeat_timeout_ms INT8 NOT NULL,
    silence_timeout_ms         INT8 NOT NULL,
    listening_gap_ms           INT8 NOT NULL,
    outward_limit_ms           INT8 NOT NULL,
    written_at                 TIMESTAMPTZ NOT NULL,
    written_by                 TEXT NOT NULL
);

-- Which bare metal database this is: a machine that belongs to another one refuses.
CREATE TABLE bmdb_identity (
    singleton  BOOL PRIMARY KEY CHECK (singleton),
    bmdb_id    UUID NOT NULL,
    created_at TIMESTAMPTZ NOT NULL
);

-- Since when heartbeats have been listened for without a gap, by listener.
CREATE TABLE fleet_listening (
    shard       INT8 PRIMARY KEY,
    since       TIMESTAMPTZ NOT NULL,
    last_commit TIMESTAMPTZ NOT NULL
);

-- Secrets, sealed with the key in --secrets_key_path. This database alone cannot open them.
CREATE TABLE sealed_secret (
    name       TEXT PRIMARY KEY,
    sealed     BYTEA NOT NULL,
    created_at TIMESTAMPTZ NOT NULL
);

-- What each provider answered last.
CREATE TABLE provider_state (
    provider    TEXT PRIMARY KEY,
    kind        TEXT NOT NULL,
    listed_at   TIMESTAMPTZ,
    machines    INT8,
    error       TEXT,
    error_at    TIMESTAMPTZ,
    brake       TEXT,
    brake_since TIMESTAMPTZ
);
