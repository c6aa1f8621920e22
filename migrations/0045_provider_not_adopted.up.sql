-- Machines of a provider's list that are not adopted because of its limit, that limit, and since when there are any. NULL: the
-- limit leaves out none, or no list was compared since this release.
ALTER TABLE provider_state ADD COLUMN not_adopted INT8;
ALTER TABLE provider_state ADD COLUMN machine_limit INT8;
ALTER TABLE provider_state ADD COLUMN not_adopted_since TIMESTAMPTZ;
