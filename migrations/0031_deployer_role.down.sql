-- In the release before this role, operators make the calls of deployers.
UPDATE access_credential SET role = 'operator' WHERE role = 'deployer';
ALTER TABLE access_credential DROP CONSTRAINT access_credential_role_name;
ALTER TABLE access_credential ADD CONSTRAINT access_credential_role_check
    CHECK (role IN ('viewer', 'operator', 'admin'));
