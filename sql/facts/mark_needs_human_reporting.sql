UPDATE machine_needs_human SET heard_since = clock_timestamp() WHERE machine_id = $1
