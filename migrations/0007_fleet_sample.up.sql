-- The fleet counted: one row a minute, by whichever shepherd took the lease for it.
CREATE TABLE fleet_sample (
    minute   TIMESTAMPTZ PRIMARY KEY,
    taken_at TIMESTAMPTZ NOT NULL,
    took_ms  INT8 NOT NULL,
    counts   JSONB NOT NULL
);
