DELETE FROM log_request WHERE request_id = $1
