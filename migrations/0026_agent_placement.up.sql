-- What agents find wrong with how they run, as a list of findings, and where a takeover put the program of a machine and
-- why. NULL: not known, because an earlier release wrote the row.
ALTER TABLE machine_release_report ADD COLUMN findings JSONB;
ALTER TABLE machine_agent_started ADD COLUMN placement TEXT;
