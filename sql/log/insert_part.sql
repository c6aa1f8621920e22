INSERT INTO log_part (request_id, number, lines) VALUES ($1, $2, $3)
