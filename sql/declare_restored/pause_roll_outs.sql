-- What was rolling out may have been ended since, or be bad: a person looks at it first.
UPDATE roll_out SET paused = 'the database was restored from a backup' WHERE ended_at IS NULL AND paused IS NULL
