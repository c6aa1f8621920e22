INSERT INTO policy (singleton, version, document, first_heartbeat_timeout_ms, silence_timeout_ms,
    listening_gap_ms, outward_limit_ms, written_at, written_by)
VALUES (TRUE, 1, $1, $2, $3, $4, $5, clock_timestamp(), 'the defaults of this release')
ON CONFLICT (singleton) DO NOTHING
