-- Re-arm or fire the timers that have come due. A timer moves to when its machine will have been silent for
-- too long, by the heartbeats received since, or fires if that time has passed. While no callback server
-- listens, silence proves nothing.
--
-- A heartbeat's row is locked before it is read. Otherwise a heartbeat that is being stored at this moment is
-- overlooked, and a machine that has just reported becomes due for recovery. If another transaction has
-- locked the row, the timer waits for the next pass.
--
-- Facts are looked up machine by machine, and the LIMIT on the policy states that it is one row. With a join
-- and without that hint, the planner reads every heartbeat of the fleet for one timer.
WITH listening AS MATERIALIZED (
    SELECT p.silence_timeout_ms * INTERVAL '1 millisecond' AS silence,
           p.first_heartbeat_timeout_ms * INTERVAL '1 millisecond' AS first,
           (SELECT min(l.since) FROM fleet_listening l
             WHERE l.last_commit > clock_timestamp() - p.listening_gap_ms * INTERVAL '1 millisecond') AS since
    FROM policy p LIMIT 1),
due_timer AS MATERIALIZED (
    SELECT d.machine_id, d.lane
    FROM machine_due d
    WHERE d.timer AND d.lease_session IS NULL AND d.ready_at <= now() AND d.rules_version <= $1
    ORDER BY d.ready_at LIMIT 1000
    FOR UPDATE OF d SKIP LOCKED),
last_contact AS MATERIALIZED (
    SELECT due_timer.machine_id, due_timer.lane,
           (SELECT a.started_at FROM machine_agent_started a WHERE a.machine_id = due_timer.machine_id) AS started,
           last_heartbeat.at AS last_heartbeat
    FROM due_timer
    LEFT JOIN LATERAL (
        SELECT h.at FROM machine_agent_heartbeat h WHERE h.machine_id = due_timer.machine_id
        FOR NO KEY UPDATE SKIP LOCKED) last_heartbeat ON TRUE
    WHERE last_heartbeat.at IS NOT NULL
       OR (SELECT h.at FROM machine_agent_heartbeat h WHERE h.machine_id = due_timer.machine_id) IS NULL),
silence_deadline AS MATERIALIZED (
    SELECT k.machine_id, k.lane,
           CASE WHEN l.since IS NULL THEN clock_timestamp() + l.silence
                WHEN k.last_heartbeat IS NULL THEN GREATEST(k.started, l.since) + l.first
                ELSE GREATEST(k.last_heartbeat, k.started, l.since) + l.silence END AS silent_from
    FROM last_contact k CROSS JOIN listening l
    WHERE k.started IS NOT NULL),
rearmed_lane AS (
    UPDATE machine_due d
    SET ready_at = GREATEST(silence_deadline.silent_from, now()),
        timer = silence_deadline.silent_from > now(),
        phase_index = CASE WHEN silence_deadline.silent_from > now() THEN d.phase_index ELSE 'Silent' END,
        phase_since = CASE WHEN silence_deadline.silent_from > now() THEN d.phase_since ELSE now() END,
        reason = CASE WHEN silence_deadline.silent_from > now() THEN d.reason
                      ELSE 'its agent has not reported for too long' END,
        version = d.version + 1
    FROM silence_deadline
    WHERE d.machine_id = silence_deadline.machine_id AND d.lane = silence_deadline.lane
      AND d.timer AND d.lease_session IS NULL AND d.ready_at <= now() AND d.rules_version <= $1
    RETURNING d.machine_id, d.timer),
history_row AS (
    INSERT INTO history (machine_id, at, event, detail)
    SELECT machine_id, clock_timestamp(), 'Silent', 'its agent has not reported for too long'
    FROM rearmed_lane WHERE NOT timer)
SELECT count(*) AS "moved!", count(*) FILTER (WHERE NOT timer) AS "fired!" FROM rearmed_lane
