SELECT count(*) AS "all!", count(*) FILTER (WHERE machine_id = $1) AS "of_machine!" FROM log_request WHERE ended_at IS NULL
