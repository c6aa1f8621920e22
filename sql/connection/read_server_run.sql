-- Read when the server process started, which is another moment after each restart, and the number of the database.
SELECT pg_postmaster_start_time()::TEXT, (SELECT oid::TEXT FROM pg_database WHERE datname = current_database())
