-- Requests for logs of machines. Whichever shepherd hears the machine next hands a request to it; what the machine brings is
-- kept until whoever asked has it, and for some minutes at the most. `log` is empty where it was asked which logs there are.
CREATE TABLE log_request (
    request_id    UUID PRIMARY KEY,
    machine_id    UUID NOT NULL REFERENCES machine (machine_id),
    log           TEXT NOT NULL,
    most_lines    INT8 NOT NULL,
    since_seconds INT8,
    follow        BOOL NOT NULL,
    asked_at      TIMESTAMPTZ NOT NULL,
    asked_by      TEXT NOT NULL,
    read_at       TIMESTAMPTZ NOT NULL,
    handed_at     TIMESTAMPTZ,
    handed_to     TEXT,
    brought_at    TIMESTAMPTZ,
    parts         INT8 NOT NULL,
    bytes         INT8 NOT NULL,
    there         JSONB,
    note          TEXT,
    ended_at      TIMESTAMPTZ,
    failed        TEXT,
    CHECK ((handed_at IS NULL) = (handed_to IS NULL)),
    CHECK (failed IS NULL OR ended_at IS NOT NULL)
);
CREATE INDEX log_request_of_machine ON log_request (machine_id) WHERE ended_at IS NULL;

-- What was brought and not taken yet, in parts that are counted from 0: lines, each with its end.
CREATE TABLE log_part (
    request_id UUID NOT NULL REFERENCES log_request (request_id),
    number     INT8 NOT NULL,
    lines      TEXT NOT NULL,
    PRIMARY KEY (request_id, number)
);
