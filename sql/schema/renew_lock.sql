UPDATE migration_lock SET until = pg_catalog.clock_timestamp() + INTERVAL '2 minutes' WHERE holder = $1
