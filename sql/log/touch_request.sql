UPDATE log_request SET read_at = clock_timestamp() WHERE request_id = $1
