UPDATE policy
SET version = version + 1, document = $1, first_heartbeat_timeout_ms = $2, silence_timeout_ms = $3,
    listening_gap_ms = $4, outward_limit_ms = $5, written_at = clock_timestamp(), written_by = $6
RETURNING version
