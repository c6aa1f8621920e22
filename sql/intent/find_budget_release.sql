-- Find when the intent began whose leaving the window frees the next use of the budget. Of the intents within
-- the window, newest first, it is the one after the first $3.
SELECT begun_at FROM intent
WHERE kind = $1 AND begun_at > clock_timestamp() - $2 * INTERVAL '1 millisecond'
ORDER BY begun_at DESC
LIMIT 1 OFFSET $3
