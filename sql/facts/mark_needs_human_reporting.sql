UPDATE machine_needs_human SET reporting_since = clock_timestamp() WHERE machine_id = $1
