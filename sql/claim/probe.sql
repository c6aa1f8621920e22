-- Report whether a process has anything due, and else when its next due row is ready. The first row of one
-- index answers this, unless that row is due but not for this shepherd (another shepherd's provider, the
-- pause after a loss, a newer release's rules). Then the caller runs probe_classes.sql. They are two
-- statements so that the server plans this one only once. Joined with the other, it is planned again for
-- every poll, which takes five times as long as the poll. `bucket >= 0` is always true and selects the index
-- to use.
SELECT ready_at <= now() AS "due!",
       GREATEST((EXTRACT(EPOCH FROM ready_at - now()) * 1000)::INT8, 0) AS "wait_ms!",
       ready_at > now() OR timer
           OR (provider = ANY ($2) AND (not_before IS NULL OR not_before <= now()) AND rules_version <= $3)
           AS "tells!"
FROM machine_due
WHERE process = $1 AND lease_session IS NULL AND bucket >= 0
ORDER BY ready_at
LIMIT 1
