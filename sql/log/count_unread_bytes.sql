SELECT COALESCE(sum(octet_length(lines)), 0)::INT8 AS "bytes!" FROM log_part WHERE request_id = $1
