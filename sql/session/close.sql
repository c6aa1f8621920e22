-- Close a session whose row the caller has locked. Its work ends first: a session that still has work is left
-- to the reaper, which records that in history.
UPDATE session
SET closed_at = clock_timestamp(), close_reason = $2
WHERE session_id = $1 AND closed_at IS NULL
  AND NOT EXISTS (SELECT 1 FROM work WHERE work.session_id = $1)
RETURNING session_id
