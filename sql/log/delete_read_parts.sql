DELETE FROM log_part WHERE request_id = $1 AND number < $2
