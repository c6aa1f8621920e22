-- Waits for every transaction that acts for the session: each holds it FOR KEY SHARE, which an UPDATE
-- of closed_at alone would pass by.
SELECT session_id FROM session WHERE session_id = $1 FOR UPDATE
