-- Machines and the facts about them: one table a fact, an absent row meaning "not so".
-- A table whose name starts with `machine_` and whose key is `machine_id` is a tag, and is shown by
-- reflection; machine_due is the one exception.

CREATE TABLE machine (
    machine_id UUID PRIMARY KEY,
    created_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE machine_provided (
    machine_id  UUID PRIMARY KEY REFERENCES machine (machine_id),
    provider    TEXT NOT NULL,
    provider_id TEXT NOT NULL,
    reservation TEXT,
    address     TEXT,
    ssh_port    INT8 CHECK (ssh_port BETWEEN 1 AND 65535),
    ssh_user    TEXT,
    location    TEXT,
    status      TEXT NOT NULL,
    provided_at TIMESTAMPTZ NOT NULL,
    looked_at   TIMESTAMPTZ,
    unchanged   BOOL NOT NULL,
    UNIQUE (provider, provider_id)
);

CREATE TABLE machine_agent_started (
    machine_id  UUID PRIMARY KEY REFERENCES machine (machine_id),
    started_at  TIMESTAMPTZ NOT NULL,
    public_key  BYTEA NOT NULL CHECK (length(public_key) = 32),
    boot_id     TEXT,
    version     TEXT,
    supervision TEXT,
    fence       INT8 NOT NULL
);
CREATE INDEX machine_agent_started_by_key ON machine_agent_started (public_key);

-- No column is indexed but the key, so that a heartbeat is a heap-only update. The boot before the
-- present one is kept so that a late heartbeat of it is not taken for yet another boot.
CREATE TABLE machine_agent_heartbeat (
    machine_id       UUID PRIMARY KEY REFERENCES machine (machine_id),
    at               TIMESTAMPTZ NOT NULL,
    boot_id          TEXT NOT NULL,
    incarnation      TEXT NOT NULL,
    sequence         INT8 NOT NULL,
    version          TEXT,
    previous_boot_id TEXT
);

CREATE TABLE machine_hardware_report (
    machine_id    UUID PRIMARY KEY REFERENCES machine (machine_id),
    received_at   TIMESTAMPTZ NOT NULL,
    incarnation   TEXT NOT NULL,
    report        BYTEA NOT NULL,
    manufacturer  TEXT,
    product       TEXT,
    serial_number TEXT,
    memory_bytes  INT8 NOT NULL,
    cpu_threads   INT8 NOT NULL
);

CREATE TABLE machine_os_installation_request (
    machine_id      UUID PRIMARY KEY REFERENCES machine (machine_id),
    generation      INT8 NOT NULL,
    artefact_url    TEXT NOT NULL,
    artefact_sha256 BYTEA NOT NULL,
    requested_at    TIMESTAMPTZ NOT NULL
);

CREATE TABLE machine_os_installation_report (
    machine_id  UUID PRIMARY KEY REFERENCES machine (machine_id),
    generation  INT8 NOT NULL,
    succeeded   BOOL NOT NULL,
    error       TEXT,
    reported_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE machine_hold (
    machine_id UUID PRIMARY KEY REFERENCES machine (machine_id),
    scope      TEXT NOT NULL,
    reason     TEXT NOT NULL,
    held_by    TEXT NOT NULL,
    held_at    TIMESTAMPTZ NOT NULL,
    until      TIMESTAMPTZ
);

CREATE TABLE machine_quarantine (
    machine_id UUID PRIMARY KEY REFERENCES machine (machine_id),
    since      TIMESTAMPTZ NOT NULL,
    reason     TEXT NOT NULL
);

CREATE TABLE machine_needs_human (
    machine_id UUID PRIMARY KEY REFERENCES machine (machine_id),
    since      TIMESTAMPTZ NOT NULL,
    reason     TEXT NOT NULL
);

CREATE TABLE machine_recovery (
    machine_id     UUID PRIMARY KEY REFERENCES machine (machine_id),
    started_at     TIMESTAMPTZ NOT NULL,
    rung           INT8 NOT NULL CHECK (rung >= 0),
    tries          INT8 NOT NULL CHECK (tries >= 0),
    step           TEXT,
    acted_at       TIMESTAMPTZ,
    deadline       TIMESTAMPTZ,
    boot_id_before TEXT,
    next_at        TIMESTAMPTZ NOT NULL,
    note           TEXT NOT NULL,
    CHECK ((step IS NULL) = (acted_at IS NULL) AND (step IS NULL) = (deadline IS NULL))
);

CREATE TABLE machine_retirement (
    machine_id   UUID PRIMARY KEY REFERENCES machine (machine_id),
    reason       TEXT NOT NULL,
    requested_at TIMESTAMPTZ NOT NULL,
    finished_at  TIMESTAMPTZ
);

-- The host keys that are believed, and one that was offered instead and refused.
CREATE TABLE machine_ssh_host_key (
    machine_id        UUID PRIMARY KEY REFERENCES machine (machine_id),
    algorithm         TEXT NOT NULL,
    public_key        BYTEA NOT NULL,
    source            TEXT NOT NULL CHECK (source IN ('first-use', 'provider', 'allowed')),
    pinned_at         TIMESTAMPTZ NOT NULL,
    refused_algorithm TEXT,
    refused_key       BYTEA,
    refused_at        TIMESTAMPTZ,
    CHECK ((refused_key IS NULL) = (refused_at IS NULL))
);

-- Processes that failed and have not finished since.
CREATE TABLE work_backoff (
    machine_id       UUID NOT NULL REFERENCES machine (machine_id),
    process          TEXT NOT NULL,
    failures         INT8 NOT NULL,
    last_interval_ms INT8 NOT NULL,
    until            TIMESTAMPTZ NOT NULL,
    cause            TEXT NOT NULL,
    PRIMARY KEY (machine_id, process)
);

-- Processes put off without having failed: a brake, a budget.
CREATE TABLE work_postponed (
    machine_id UUID NOT NULL REFERENCES machine (machine_id),
    process    TEXT NOT NULL,
    until      TIMESTAMPTZ NOT NULL,
    reason     TEXT NOT NULL,
    decided_at TEXT NOT NULL,
    PRIMARY KEY (machine_id, process)
);
