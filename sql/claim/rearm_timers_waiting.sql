-- As rearm_timers.sql, for a database that cannot skip locked rows.
WITH listening AS MATERIALIZED (
    SELECT p.silence_timeout_ms * INTERVAL '1 millisecond' AS silence,
           p.first_heartbeat_timeout_ms * INTERVAL '1 millisecond' AS first,
           (SELECT min(l.since) FROM fleet_listening l
             WHERE l.last_commit > clock_timestamp() - p.listening_gap_ms * INTERVAL '1 millisecond') AS since
    FROM policy p LIMIT 1),
come AS MATERIALIZED (
    SELECT d.machine_id, d.lane
    FROM machine_due d
    WHERE d.timer AND d.lease_session IS NULL AND d.ready_at <= now() AND d.rules_version <= $1
    ORDER BY d.machine_id, d.lane LIMIT 1000
    FOR UPDATE OF d),
known AS MATERIALIZED (
    SELECT come.machine_id, come.lane,
           (SELECT a.started_at FROM machine_agent_started a WHERE a.machine_id = come.machine_id) AS started,
           heard.at AS heard
    FROM come
    LEFT JOIN LATERAL (
        SELECT h.at FROM machine_agent_heartbeat h WHERE h.machine_id = come.machine_id
        FOR NO KEY UPDATE) heard ON TRUE),
truth AS MATERIALIZED (
    SELECT k.machine_id, k.lane,
           CASE WHEN l.since IS NULL THEN clock_timestamp() + l.silence
                WHEN k.heard IS NULL THEN GREATEST(k.started, l.since) + l.first
                ELSE GREATEST(k.heard, k.started, l.since) + l.silence END AS silent_from
    FROM known k CROSS JOIN listening l
    WHERE k.started IS NOT NULL),
armed AS (
    UPDATE machine_due d
    SET ready_at = GREATEST(truth.silent_from, now()),
        timer = truth.silent_from > now(),
        phase_index = CASE WHEN truth.silent_from > now() THEN d.phase_index ELSE 'Silent' END,
        phase_since = CASE WHEN truth.silent_from > now() THEN d.phase_since ELSE now() END,
        reason = CASE WHEN truth.silent_from > now() THEN d.reason
                      ELSE 'its agent has not reported for too long' END,
        version = d.version + 1
    FROM truth
    WHERE d.machine_id = truth.machine_id AND d.lane = truth.lane
      AND d.timer AND d.lease_session IS NULL AND d.ready_at <= now() AND d.rules_version <= $1
    RETURNING d.machine_id, d.timer),
told AS (
    INSERT INTO history (machine_id, at, event, detail)
    SELECT machine_id, clock_timestamp(), 'Silent', 'its agent has not reported for too long'
    FROM armed WHERE NOT timer)
SELECT count(*) AS "moved!", count(*) FILTER (WHERE NOT timer) AS "fired!" FROM armed
