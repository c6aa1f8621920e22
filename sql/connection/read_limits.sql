-- Read how many connections the role of this one, its database and the server admit (a negative number: any), and how
-- many there are of others. A superuser has no limit but the server's.
SELECT CASE WHEN r.rolsuper THEN -1 ELSE r.rolconnlimit::INT8 END AS "role_limit!",
       CASE WHEN r.rolsuper THEN -1 ELSE d.datconnlimit::INT8 END AS "database_limit!",
       current_setting('max_connections')::INT8
           - CASE WHEN r.rolsuper THEN 0
                  ELSE current_setting('superuser_reserved_connections')::INT8
                      + coalesce(current_setting('reserved_connections', TRUE), '0')::INT8
             END AS "server_limit!",
       count(a.pid) FILTER (WHERE a.usename = r.rolname) AS "role_used!",
       count(a.pid) FILTER (WHERE a.datname = d.datname) AS "database_used!",
       count(a.pid) AS "server_used!"
FROM pg_roles r
CROSS JOIN pg_database d
LEFT JOIN pg_stat_activity a
    ON a.usename IS NOT NULL AND coalesce(a.backend_type, 'client backend') = 'client backend' AND a.pid <> pg_backend_pid()
WHERE r.rolname = session_user AND d.datname = current_database()
GROUP BY r.rolsuper, r.rolconnlimit, r.rolname, d.datconnlimit, d.datname
