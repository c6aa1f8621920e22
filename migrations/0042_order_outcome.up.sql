-- The outcome `no_effect`: what an order requested does not hold, and nothing was changed. `unchanged` is left for orders
-- whose request held already. Lines that exist keep `unchanged`, also where the request did not hold.
--
-- As in 0031, CockroachDB has another name for the check of migration 0006 than PostgreSQL. `NOT VALID` checks new lines only:
-- all lines passed the stricter check before, and a scan of a large audit would hold it locked until the statement times out.
SET LOCAL client_min_messages = 'warning';
ALTER TABLE audit DROP CONSTRAINT IF EXISTS audit_outcome_check;
ALTER TABLE audit DROP CONSTRAINT IF EXISTS check_outcome;
ALTER TABLE audit ADD CONSTRAINT audit_outcome_name
    CHECK (outcome IN ('changed', 'unchanged', 'no_effect', 'refused')) NOT VALID;
