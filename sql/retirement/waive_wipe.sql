UPDATE machine_retirement SET wipe_waived_at = clock_timestamp(), wipe_waived_by = $2
WHERE machine_id = $1 AND wipe_waived_at IS NULL AND finished_at IS NULL
