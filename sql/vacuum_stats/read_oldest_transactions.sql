-- Read the seconds since the oldest transaction of this database began, and since the oldest one that keeps a
-- snapshot. Vacuum removes nothing that still existed when that one began. The server's own clock is used,
-- because the server stamps transactions with it. Vacuum's own transactions are left out, because they delay
-- nothing.
WITH clock AS MATERIALIZED (SELECT pg_catalog.clock_timestamp() AS read),
open_transaction AS (
    SELECT a.xact_start AS since, a.backend_xmin IS NOT NULL AS keeps_rows
    FROM pg_stat_activity a
    WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.xact_start IS NOT NULL
      AND a.backend_type = 'client backend' AND a.query !~* '^\s*(auto)?vacuum'
    UNION ALL
    SELECT p.prepared, TRUE FROM pg_prepared_xacts p WHERE p.database = current_database())
SELECT COALESCE(EXTRACT(EPOCH FROM min(read) - min(since)), 0)::FLOAT8
           AS "transaction!",
       COALESCE(EXTRACT(EPOCH FROM min(read) - min(since) FILTER (WHERE keeps_rows)), 0)::FLOAT8
           AS "snapshot!"
FROM clock LEFT JOIN open_transaction ON TRUE
