INSERT INTO migration_lock AS l (singleton, holder, until)
VALUES (TRUE, $1, pg_catalog.clock_timestamp() + INTERVAL '2 minutes')
ON CONFLICT (singleton) DO UPDATE SET holder = EXCLUDED.holder, until = EXCLUDED.until
WHERE l.until < pg_catalog.clock_timestamp()
