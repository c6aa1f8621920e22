-- The release before has one name for all orders that changed nothing. After the update no line breaks the older check, so
-- `NOT VALID` spares a scan under an exclusive lock.
UPDATE audit SET outcome = 'unchanged' WHERE outcome = 'no_effect';
ALTER TABLE audit DROP CONSTRAINT audit_outcome_name;
ALTER TABLE audit ADD CONSTRAINT audit_outcome_check
    CHECK (outcome IN ('changed', 'unchanged', 'refused')) NOT VALID;
