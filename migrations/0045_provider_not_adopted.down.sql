ALTER TABLE provider_state DROP COLUMN not_adopted_since;
ALTER TABLE provider_state DROP COLUMN machine_limit;
ALTER TABLE provider_state DROP COLUMN not_adopted;
