-- Insert an intent that is already resolved. It counts against the budget of its kind, and has no outcome
-- that could stay open.
INSERT INTO intent (intent_id, kind, provider, machine_id, session_id, fence, detail, begun_at, settled_at, outcome)
VALUES ($1, $2, $3, $4, $5, $6, $7, clock_timestamp(), clock_timestamp(), 'ordered')
