-- List when providers were ordered to take machines back, within the window of the release budget.
SELECT begun_at FROM intent
WHERE kind = 'release' AND begun_at > clock_timestamp() - $1 * INTERVAL '1 millisecond'
ORDER BY begun_at
