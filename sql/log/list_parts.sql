SELECT number, lines FROM log_part WHERE request_id = $1 AND number >= $2 ORDER BY number LIMIT $3
