DELETE FROM work_backoff WHERE machine_id = $1 AND process = $2
