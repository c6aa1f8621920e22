-- The role `deployer`, between operator and admin. Credentials that exist keep their roles.
--
-- CockroachDB has another name for the check of migration 0006 than PostgreSQL, and adds no check under the name of one that
-- the same transaction drops. The notice that one of the two names does not exist is of no use in a log.
SET LOCAL client_min_messages = 'warning';
ALTER TABLE access_credential DROP CONSTRAINT IF EXISTS access_credential_role_check;
ALTER TABLE access_credential DROP CONSTRAINT IF EXISTS check_role;
ALTER TABLE access_credential ADD CONSTRAINT access_credential_role_name
    CHECK (role IN ('viewer', 'operator', 'deployer', 'admin'));
