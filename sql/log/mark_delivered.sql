UPDATE log_request SET handed_at = clock_timestamp(), handed_to = $2 WHERE request_id = $1
