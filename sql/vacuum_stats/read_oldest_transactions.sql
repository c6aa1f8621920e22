-- Seconds since the oldest transaction of this database began, and the oldest among those that keep a
-- snapshot: vacuum removes nothing that was still there then. The server's own clock, because that is
-- what it stamps transactions with; vacuum itself keeps nobody waiting.
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
