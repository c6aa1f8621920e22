UPDATE log_request SET delivered_at = clock_timestamp(), delivered_to = $2 WHERE request_id = $1
