UPDATE log_request
SET brought_at = clock_timestamp(), parts = $2, bytes = bytes + $3, there = COALESCE($4, there), note = COALESCE($5, note),
    ended_at = CASE WHEN $6 THEN clock_timestamp() END, failed = $7
WHERE request_id = $1
