-- The release before has one name for all orders that changed nothing.
UPDATE audit SET outcome = 'unchanged' WHERE outcome = 'no_effect';
ALTER TABLE audit DROP CONSTRAINT audit_outcome_name;
ALTER TABLE audit ADD CONSTRAINT audit_outcome_check
    CHECK (outcome IN ('changed', 'unchanged', 'refused'));
