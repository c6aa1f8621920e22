-- Which release of the role server a machine was last asked to become. The number outlives the roll-out that asked: a
-- machine passes over every order that is not newer than the newest that has ended there. One that is withdrawn is asked
-- of nobody any more.
CREATE TABLE release_order (
    machine_id       UUID PRIMARY KEY REFERENCES machine (machine_id),
    generation       INT8 NOT NULL,
    sha256           BYTEA NOT NULL CHECK (length(sha256) = 32),
    deadline_seconds INT8 NOT NULL,
    ordered_at       TIMESTAMPTZ NOT NULL,
    withdrawn        BOOL NOT NULL
);

-- Which release its agent said last that it is, and how the newest order ended there.
CREATE TABLE machine_release_report (
    machine_id  UUID PRIMARY KEY REFERENCES machine (machine_id),
    generation  INT8 NOT NULL,
    sha256      BYTEA NOT NULL CHECK (length(sha256) = 32),
    error       TEXT,
    reported_at TIMESTAMPTZ NOT NULL
);

-- Roll-outs of a release. One that has a reason to stand still is paused until an operator resumes it.
CREATE TABLE roll_out (
    roll_out_id      TEXT PRIMARY KEY,
    sha256           BYTEA NOT NULL CHECK (length(sha256) = 32),
    release          TEXT NOT NULL,
    selector         TEXT NOT NULL,
    parallelism      INT8 NOT NULL,
    deadline_seconds INT8 NOT NULL,
    created_at       TIMESTAMPTZ NOT NULL,
    created_by       TEXT NOT NULL,
    reason           TEXT NOT NULL,
    paused           TEXT,
    ended_at         TIMESTAMPTZ,
    ended            TEXT,
    CHECK ((ended_at IS NULL) = (ended IS NULL))
);

-- Its machines. One is in one roll-out at a time, until that has ended.
CREATE TABLE roll_out_machine (
    roll_out_id TEXT NOT NULL REFERENCES roll_out (roll_out_id),
    machine_id  UUID NOT NULL REFERENCES machine (machine_id),
    state       TEXT NOT NULL,
    generation  INT8,
    said        TEXT,
    changed_at  TIMESTAMPTZ NOT NULL,
    active      BOOL NOT NULL,
    PRIMARY KEY (roll_out_id, machine_id)
);
CREATE UNIQUE INDEX roll_out_machine_active ON roll_out_machine (machine_id) WHERE active;
