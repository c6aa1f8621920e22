-- Check that a session is live, and lock its row: every transaction that acts for a session begins here.
-- FOR SHARE would block its renewal. The deadline is compared with clock_timestamp(), because
-- now() is when the transaction began.
SELECT session_id
FROM session
WHERE session_id = $1 AND closed_at IS NULL AND deadline > clock_timestamp()
FOR KEY SHARE
