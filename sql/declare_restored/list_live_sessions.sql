-- List the sessions that still work on this database: a restore is declared while none does.
SELECT component, runtime_info->>'host' AS host, runtime_info->>'pid' AS pid
FROM session
WHERE closed_at IS NULL AND deadline > clock_timestamp()
ORDER BY started_at
LIMIT 10
