SELECT count(*) AS "count!", min(begun_at) AS oldest FROM intent
WHERE kind = $1 AND begun_at > clock_timestamp() - $2 * INTERVAL '1 millisecond'
