DELETE FROM migration_lock WHERE holder = $1
