-- Read how many connections the role of this one, its database and the server admit (a negative number: any), and how
-- many there are of others. A superuser has no limit but the server's. Idle ones that this process could have opened
-- belong to a former run: a pooler keeps them, and gives them to this one. A row that is hidden from this role is a
-- client's if it has a database.
SELECT CASE WHEN r.rolsuper THEN -1 ELSE r.rolconnlimit::INT8 END AS "role_limit!",
       CASE WHEN r.rolsuper THEN -1 ELSE d.datconnlimit::INT8 END AS "database_limit!",
       current_setting('max_connections')::INT8
           - CASE WHEN r.rolsuper THEN 0 ELSE current_setting('superuser_reserved_connections')::INT8 END
           - CASE WHEN r.rolsuper OR EXISTS (SELECT FROM pg_roles g
                                             WHERE g.rolname = 'pg_use_reserved_connections'
                                               AND pg_has_role(r.oid, g.oid, 'USAGE')) THEN 0
                  ELSE coalesce(current_setting('reserved_connections', TRUE), '0')::INT8
             END AS "server_limit!",
       count(a.pid) FILTER (WHERE a.usename = r.rolname) AS "role_used!",
       count(a.pid) FILTER (WHERE a.datname = d.datname) AS "database_used!",
       count(a.pid) AS "server_used!"
FROM pg_roles r
CROSS JOIN pg_database d
LEFT JOIN pg_stat_activity a
    ON a.usename IS NOT NULL AND a.pid <> pg_backend_pid()
    AND (a.backend_type = 'client backend' OR (a.backend_type IS NULL AND a.datid IS NOT NULL))
    AND NOT (a.usename = r.rolname AND a.datname IS NOT DISTINCT FROM d.datname
        AND coalesce(a.state, '') = 'idle'
        AND a.client_addr IS NOT DISTINCT FROM inet_client_addr()
        AND starts_with(coalesce(a.application_name, ''), current_setting('application_name')))
WHERE r.rolname = session_user AND d.datname = current_database()
GROUP BY r.oid, r.rolsuper, r.rolconnlimit, r.rolname, d.datconnlimit, d.datname
