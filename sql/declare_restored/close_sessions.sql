-- Close the sessions that were open when the backup was taken. Their processes have exited, or have newer
-- state than the backup.
UPDATE session SET closed_at = clock_timestamp(), close_reason = 'the database was restored from a backup'
WHERE closed_at IS NULL
RETURNING session_id
