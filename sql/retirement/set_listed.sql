UPDATE machine_retirement SET listed_since = CASE WHEN $2 THEN clock_timestamp() END
WHERE machine_id = $1 AND finished_at IS NOT NULL AND (listed_since IS NOT NULL) <> $2
