-- Free the work of closed sessions. A lost session is not a failure of its machines, so it causes no backoff.
-- But a machine that kills every shepherd that works on it must not take the fleet down, so each loss in a
-- row doubles the pause, up to an hour. The pause counts from closed_at, because an outward call that was
-- under way then may last that long. Open intents are resolved as unknown: whether the step was taken cannot
-- be known any more.
WITH lost_work AS MATERIALIZED (
    SELECT d.machine_id, d.lane, d.fence, d.lease_session, w.process, s.closed_at
    FROM work w
    JOIN session s ON s.session_id = w.session_id AND s.closed_at IS NOT NULL
    JOIN machine_due d ON d.machine_id = w.machine_id AND d.lane = w.lane AND d.lease_session = w.session_id
    ORDER BY d.machine_id, d.lane LIMIT 500
    FOR UPDATE OF d SKIP LOCKED),
released_lease AS (
    UPDATE machine_due d
    SET lease_session = NULL,
        losses = d.losses + 1,
        not_before = lost_work.closed_at + LEAST(
            (SELECT outward_limit_ms FROM policy) * power(2, LEAST(d.losses, 20)), 3600000)
            * INTERVAL '1 millisecond'
    FROM lost_work
    WHERE d.machine_id = lost_work.machine_id AND d.lane = lost_work.lane
      AND d.fence = lost_work.fence AND d.lease_session = lost_work.lease_session
    RETURNING d.machine_id, d.lane, d.fence, lost_work.lease_session, lost_work.process),
deleted_work AS (
    DELETE FROM work w USING released_lease f WHERE w.machine_id = f.machine_id AND w.lane = f.lane),
history_row AS (
    INSERT INTO history (machine_id, at, event, edge, lane, fence, process, session_id, detail)
    SELECT machine_id, clock_timestamp(), 'Expired', 'end', lane, fence, process, lease_session,
           'the session that held it was lost'
    FROM released_lease),
resolved_intent AS (
    UPDATE intent i
    SET settled_at = clock_timestamp(), outcome = 'unknown: the session that took the step was lost'
    FROM released_lease f
    WHERE i.machine_id = f.machine_id AND i.session_id = f.lease_session AND i.fence = f.fence
      AND i.settled_at IS NULL)
SELECT machine_id, lane, fence, process FROM released_lease
