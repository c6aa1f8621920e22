-- One index probe: is anything due for this process, and when next.
SELECT ready_at AS "ready_at!", ready_at <= now() AS "due!",
       GREATEST((EXTRACT(EPOCH FROM ready_at - now()) * 1000)::INT8, 0) AS "wait_ms!"
FROM machine_due
WHERE process = $1 AND lease_session IS NULL
ORDER BY ready_at
LIMIT 1
