-- Sent once the session's row is locked. Work goes first: a session that still holds some is left to
-- the reaper, which says so in history.
UPDATE session
SET closed_at = clock_timestamp(), close_reason = $2
WHERE session_id = $1 AND closed_at IS NULL
  AND NOT EXISTS (SELECT 1 FROM work WHERE work.session_id = $1)
RETURNING session_id
