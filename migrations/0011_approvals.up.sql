-- Orders that need another admin, as they were asked for: of whom, under which key, and what became of that. The order
-- itself is not here but its digest; whoever asked gives it again when it is approved. A row is used once.
CREATE TABLE approval (
    approval_id            UUID PRIMARY KEY,
    actor                  TEXT NOT NULL,
    credential_id          UUID,
    idempotency_key        TEXT NOT NULL,
    rpc                    TEXT NOT NULL,
    request                BYTEA NOT NULL,
    target                 TEXT NOT NULL,
    reason                 TEXT NOT NULL,
    asked_at               TIMESTAMPTZ NOT NULL,
    expires_at             TIMESTAMPTZ NOT NULL,
    approved_by            TEXT,
    approver_credential_id UUID,
    approved_at            TIMESTAMPTZ,
    approve_reason         TEXT,
    used_at                TIMESTAMPTZ,
    CHECK ((approved_by IS NULL) = (approved_at IS NULL)),
    CHECK (used_at IS NULL OR approved_at IS NOT NULL)
);
-- An order is asked for once for each key that its actor gives.
CREATE UNIQUE INDEX approval_by_key ON approval (actor, idempotency_key);
-- Lists, newest first, and what is old.
CREATE INDEX approval_by_age ON approval (asked_at, approval_id);
