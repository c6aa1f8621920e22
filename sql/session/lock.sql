-- Lock a session, and so wait for every transaction that acts for it. Each one locks the row FOR KEY SHARE,
-- for which an UPDATE of closed_at alone would not wait.
SELECT session_id FROM session WHERE session_id = $1 FOR UPDATE
