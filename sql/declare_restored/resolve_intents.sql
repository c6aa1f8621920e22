-- Resolve the intents that were open when the backup was taken. Creations stay open: the provider is queried
-- for what it made under them.
UPDATE intent SET settled_at = clock_timestamp(), outcome = 'unknown: the database was restored from a backup'
WHERE settled_at IS NULL AND kind <> 'create'
RETURNING intent_id
