-- Roles that operators declared to clusters, as they are put to the curators: an encoded declaration without a revision.
-- A row that is withdrawn goes when no curator has it any more.
CREATE TABLE cluster_declaration (
    cluster_id   UUID NOT NULL REFERENCES cluster (cluster_id),
    role         TEXT NOT NULL,
    declaration  BYTEA NOT NULL,
    digest       BYTEA NOT NULL CHECK (length(digest) = 32),
    services     JSONB NOT NULL,
    declared_at  TIMESTAMPTZ NOT NULL,
    declared_by  TEXT NOT NULL,
    withdrawn_at TIMESTAMPTZ,
    PRIMARY KEY (cluster_id, role)
);

-- What a node runs of such roles, as it said last.
ALTER TABLE machine_cluster ADD COLUMN services JSONB;
