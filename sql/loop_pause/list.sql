-- List the pauses that are in force now.
SELECT loop_name, provider, reason, paused_by, since, until, clock_timestamp() AS "now!"
FROM loop_pause
WHERE until IS NULL OR until > clock_timestamp()
ORDER BY loop_name, provider
