UPDATE approval SET used_at = clock_timestamp() WHERE approval_id = $1 AND used_at IS NULL
