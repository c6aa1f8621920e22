-- What was being upgraded may have been ended since, or gone back: a person looks at it first.
UPDATE cluster_upgrade SET paused = 'the database was restored from a backup' WHERE ended_at IS NULL AND paused IS NULL
