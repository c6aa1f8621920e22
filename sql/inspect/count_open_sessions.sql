SELECT count(*) AS "count!" FROM (SELECT 1 FROM session WHERE closed_at IS NULL LIMIT 1000) s
