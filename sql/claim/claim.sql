-- Claim due work: lease the oldest due rows of each class (provider, priority, bucket) to all idle sessions
-- at once, with priorities sharing by weight. Candidates are read without locks. Those whose turn it is are
-- locked, skipping rows that another transaction has locked, and the UPDATE repeats the whole predicate.
--
-- The rows to lock and to update are looked up by key. IS TRUE keeps the planner from joining the few
-- candidates with everything that is due instead, through an index on the same conditions. A claim would then
-- cost as much as the backlog is long, plus the dead entries in that index.
WITH class AS MATERIALIZED (
    SELECT provider, priority, bucket, floor, pass, weight
    FROM unnest($3::TEXT[], $4::INT8[], $5::INT8[], $6::TIMESTAMPTZ[], $7::FLOAT8[], $8::FLOAT8[])
        AS t (provider, priority, bucket, floor, pass, weight)),
live_session AS MATERIALIZED (
    SELECT session_id, row_number() OVER (ORDER BY session_id) AS n
    FROM (SELECT session_id FROM session
          WHERE session_id = ANY ($1) AND closed_at IS NULL AND deadline > clock_timestamp()
          ORDER BY session_id
          FOR KEY SHARE) x),
candidate AS MATERIALIZED (
    SELECT x.machine_id, x.lane, x.ready_at,
           class.pass + row_number() OVER (PARTITION BY class.priority ORDER BY x.ready_at, x.machine_id)
               / class.weight AS turn
    FROM class CROSS JOIN LATERAL (
        SELECT d.machine_id, d.lane, d.ready_at
        FROM machine_due d
        WHERE d.process = $2 AND d.provider = class.provider AND d.priority = class.priority
          AND d.bucket = class.bucket AND d.lease_session IS NULL AND d.process IS NOT NULL
          AND d.ready_at >= class.floor AND d.ready_at <= now() AND NOT d.timer
          AND (d.not_before IS NULL OR d.not_before <= now()) AND d.rules_version <= $9
        ORDER BY d.ready_at
        LIMIT $10) x),
locked_candidate AS MATERIALIZED (
    SELECT machine_id, lane, row_number() OVER (ORDER BY turn, ready_at, machine_id) AS n
    FROM (SELECT d.machine_id, d.lane, c.turn, d.ready_at
          FROM (SELECT machine_id, lane, turn FROM candidate
                ORDER BY turn, ready_at, machine_id
                LIMIT 8 * $10) c
          JOIN machine_due d ON d.machine_id = c.machine_id AND d.lane = c.lane
          WHERE (d.lease_session IS NULL) IS TRUE AND (d.process = $2) IS TRUE AND d.ready_at <= now()
            AND NOT d.timer
            AND (d.not_before IS NULL OR d.not_before <= now()) AND d.rules_version <= $9
            AND d.provider = ANY ($3)
          ORDER BY c.turn, d.ready_at, d.machine_id
          LIMIT (SELECT count(*) FROM live_session)
          FOR UPDATE OF d SKIP LOCKED) y),
claimed AS (
    UPDATE machine_due d
    SET lease_session = live_session.session_id, fence = d.fence + 1
    FROM locked_candidate JOIN live_session USING (n)
    WHERE d.machine_id = locked_candidate.machine_id AND d.lane = locked_candidate.lane
      AND (d.lease_session IS NULL) IS TRUE AND (d.process = $2) IS TRUE AND d.ready_at <= now()
      AND NOT d.timer
      AND (d.not_before IS NULL OR d.not_before <= now()) AND d.rules_version <= $9
      AND d.provider = ANY ($3)
    RETURNING d.machine_id, d.lane, d.fence, d.lease_session, d.provider, d.priority, d.bucket, d.ready_at),
work_row AS (
    INSERT INTO work (machine_id, lane, session_id, process, fence, started_at)
    SELECT machine_id, lane, lease_session, $2, fence, clock_timestamp() FROM claimed),
history_row AS (
    INSERT INTO history (machine_id, at, event, edge, lane, fence, process, session_id)
    SELECT machine_id, clock_timestamp(), 'Started', 'start', lane, fence, $2, lease_session FROM claimed)
SELECT c.candidates AS "candidates!", c.sessions AS "sessions!",
       t.machine_id AS "machine_id?", t.lane AS "lane?", t.fence AS "fence?",
       t.lease_session AS "session_id?", t.provider AS "provider?", t.priority AS "priority?",
       t.bucket AS "bucket?", t.ready_at AS "ready_at?",
       EXTRACT(EPOCH FROM clock_timestamp() - t.ready_at)::FLOAT8 AS "waited?"
FROM (SELECT (SELECT count(*) FROM candidate) AS candidates, (SELECT count(*) FROM live_session) AS sessions) c
LEFT JOIN claimed t ON TRUE
