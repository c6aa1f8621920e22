-- Is anything due for this process, and when next: the first row of one index tells, unless it is due and not
-- for us (another shepherd's provider, the pause after a loss, a newer release's rules). Then probe_classes.sql
-- is asked. They are two statements so that the server plans this one once: joined with the other it is planned
-- anew for every poll, which takes five times as long as the poll. `bucket >= 0` is always so, and says which index is
-- meant.
SELECT ready_at <= now() AS "due!",
       GREATEST((EXTRACT(EPOCH FROM ready_at - now()) * 1000)::INT8, 0) AS "wait_ms!",
       ready_at > now() OR timer
           OR (provider = ANY ($2) AND (not_before IS NULL OR not_before <= now()) AND rules_version <= $3)
           AS "tells!"
FROM machine_due
WHERE process = $1 AND lease_session IS NULL AND bucket >= 0
ORDER BY ready_at
LIMIT 1
