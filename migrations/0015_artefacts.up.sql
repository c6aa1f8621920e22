-- Files that machines fetch from any shepherd, known by the SHA-256 of what is in them. One counts only when that was
-- found right. `upload` is another one whenever it is begun anew, so that who verified the pieces of one upload cannot
-- declare another one whole.
CREATE TABLE artefact (
    sha256   BYTEA PRIMARY KEY CHECK (length(sha256) = 32),
    size     INT8 NOT NULL CHECK (size > 0),
    upload   UUID NOT NULL,
    begun_at TIMESTAMPTZ NOT NULL,
    name     TEXT,
    added_at TIMESTAMPTZ,
    added_by TEXT,
    CHECK ((added_at IS NULL) = (added_by IS NULL) AND (added_at IS NULL) = (name IS NULL))
);

-- Its pieces of 256 KiB each, the last one shorter, counted from 0. None is ever changed.
CREATE TABLE artefact_chunk (
    sha256 BYTEA NOT NULL REFERENCES artefact (sha256),
    number INT8 NOT NULL,
    bytes  BYTEA NOT NULL,
    PRIMARY KEY (sha256, number)
);
