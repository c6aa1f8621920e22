UPDATE log_request SET ended_at = clock_timestamp(), failed = $2 WHERE request_id = $1 AND ended_at IS NULL
