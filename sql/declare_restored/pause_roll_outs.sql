-- Pause every roll-out that is under way. It may have ended since the backup, or be bad, so an operator
-- reviews it first.
UPDATE roll_out SET paused = 'the database was restored from a backup' WHERE ended_at IS NULL AND paused IS NULL
