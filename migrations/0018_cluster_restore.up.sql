-- A cluster that is brought back from a snapshot: from which, onto which machine if a person said one, since when, and as
-- whom. `epoch` is how often it was restored, as far as we or its curators know.
ALTER TABLE cluster ADD COLUMN epoch INT8 NOT NULL DEFAULT 0;
ALTER TABLE cluster ADD COLUMN restored_at TIMESTAMPTZ;
ALTER TABLE cluster ADD COLUMN restoring_since TIMESTAMPTZ;
ALTER TABLE cluster ADD COLUMN restoring_by TEXT;
ALTER TABLE cluster ADD COLUMN restoring_onto UUID;
ALTER TABLE cluster ADD COLUMN restoring_from UUID;

-- The highest epoch that the machine has heard of.
ALTER TABLE machine_cluster_report ADD COLUMN epoch INT8 NOT NULL DEFAULT 0;
