-- Certificates that people asked for from the curators of clusters. The key is theirs: what comes here is its public half.
-- Whoever holds the cluster's lease has it signed, and has the curators refuse it once somebody wants that.
CREATE TABLE cluster_credential (
    credential_id    UUID PRIMARY KEY,
    cluster_id       UUID NOT NULL REFERENCES cluster (cluster_id),
    public_key       BYTEA NOT NULL CHECK (length(public_key) = 32),
    holder           TEXT NOT NULL,
    lifetime_seconds INT8 NOT NULL,
    asked_at         TIMESTAMPTZ NOT NULL,
    asked_by         TEXT NOT NULL,
    certificate      BYTEA,
    serial           TEXT,
    expires_at       TIMESTAMPTZ,
    refused          TEXT,
    revoke_asked_at  TIMESTAMPTZ,
    revoke_asked_by  TEXT,
    revoked_at       TIMESTAMPTZ,
    CHECK ((certificate IS NULL) = (serial IS NULL) AND (serial IS NULL) = (expires_at IS NULL))
);
CREATE UNIQUE INDEX cluster_credential_by_key ON cluster_credential (cluster_id, public_key);
