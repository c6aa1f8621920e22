-- Pause every upgrade that is under way. It may have ended or been rolled back since the backup, so an
-- operator reviews it first.
UPDATE cluster_upgrade SET paused = 'the database was restored from a backup' WHERE ended_at IS NULL AND paused IS NULL
