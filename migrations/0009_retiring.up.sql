-- Retiring in stages: who asked for it, whether the machine is to be wiped first, what a person waived, under
-- which intent its provider was told to take it back, and how it ended. A machine of the release before has none
-- in its retirement: nothing there began one.
ALTER TABLE machine_retirement ADD COLUMN requested_by TEXT NOT NULL DEFAULT 'somebody';
ALTER TABLE machine_retirement ADD COLUMN wipe BOOL NOT NULL DEFAULT FALSE;
ALTER TABLE machine_retirement ADD COLUMN wipe_waived_at TIMESTAMPTZ;
ALTER TABLE machine_retirement ADD COLUMN wipe_waived_by TEXT;
ALTER TABLE machine_retirement ADD COLUMN release_ordered_at TIMESTAMPTZ;
ALTER TABLE machine_retirement ADD COLUMN release_intent UUID;
ALTER TABLE machine_retirement ADD COLUMN outcome TEXT;
-- Since when the provider's list names it although it is retired.
ALTER TABLE machine_retirement ADD COLUMN listed_since TIMESTAMPTZ;
