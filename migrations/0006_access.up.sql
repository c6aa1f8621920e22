-- Who may ask and order through the fleet API, and what was ordered.

-- Bearer tokens and pinned client certificates. A token is not kept: its row has what a token is checked
-- against (`proof`), and that gives no token back. A row stays when it is revoked or over, because the
-- audit names it.
CREATE TABLE access_credential (
    credential_id UUID PRIMARY KEY,
    kind          TEXT NOT NULL CHECK (kind IN ('token', 'certificate')),
    name          TEXT NOT NULL,
    role          TEXT NOT NULL CHECK (role IN ('viewer', 'operator', 'admin')),
    -- Names of the providers whose machines it is good for; null is all, and what is the fleet's as a whole.
    providers     JSONB,
    proof         BYTEA NOT NULL UNIQUE CHECK (length(proof) = 32),
    created_at    TIMESTAMPTZ NOT NULL,
    created_by    TEXT NOT NULL,
    expires_at    TIMESTAMPTZ,
    revoked_at    TIMESTAMPTZ,
    revoked_by    TEXT,
    CHECK ((revoked_at IS NULL) = (revoked_by IS NULL))
);

-- Every order, in the transaction that carries it out. Inserted into and, after the retention time,
-- deleted from; never updated.
CREATE TABLE audit (
    audit_id        UUID PRIMARY KEY,
    at              TIMESTAMPTZ NOT NULL,
    actor           TEXT NOT NULL,
    credential_id   UUID,
    rpc             TEXT NOT NULL,
    target          TEXT NOT NULL,
    machine_id      UUID,
    reason          TEXT NOT NULL,
    idempotency_key TEXT,
    -- What was asked for, so that a key used again for something else is found out.
    request         BYTEA NOT NULL,
    dry_run         BOOL NOT NULL,
    outcome         TEXT NOT NULL CHECK (outcome IN ('changed', 'unchanged', 'refused')),
    said            TEXT NOT NULL,
    before          JSONB,
    after           JSONB
);
-- Pages, newest first, and what is old.
CREATE INDEX audit_by_age ON audit (at, audit_id);
CREATE INDEX audit_by_machine ON audit (machine_id, at) WHERE machine_id IS NOT NULL;
-- An order is carried out once for each key that its actor gives.
CREATE UNIQUE INDEX audit_by_key ON audit (actor, idempotency_key) WHERE idempotency_key IS NOT NULL AND NOT dry_run;
