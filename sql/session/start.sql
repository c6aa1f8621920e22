INSERT INTO session (session_id, process_id, component, runtime_info, interval_ms, started_at, deadline)
VALUES ($1, $2, $3, $4, $5::INT8, clock_timestamp(), clock_timestamp() + $5::INT8 * INTERVAL '1 millisecond')
