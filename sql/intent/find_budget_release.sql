-- When the one began with whose leaving the window the next is free: of those within it, the newest but so many.
SELECT begun_at FROM intent
WHERE kind = $1 AND begun_at > clock_timestamp() - $2 * INTERVAL '1 millisecond'
ORDER BY begun_at DESC
LIMIT 1 OFFSET $3
