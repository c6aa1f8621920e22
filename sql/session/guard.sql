-- Every transaction that acts for a session begins here. FOR SHARE would block its renewal, and
-- now() is when the transaction began.
SELECT session_id
FROM session
WHERE session_id = $1 AND closed_at IS NULL AND deadline > clock_timestamp()
FOR KEY SHARE
