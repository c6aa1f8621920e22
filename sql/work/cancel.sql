-- Cancel a work item of a live session: release its lease, record the end in history, and resolve its open
-- intents as unknown.
WITH live_session AS MATERIALIZED (
    SELECT session_id FROM session
    WHERE session_id = $1 AND closed_at IS NULL AND deadline > clock_timestamp()
    FOR KEY SHARE),
released_lease AS (
    UPDATE machine_due d
    SET lease_session = NULL
    WHERE d.machine_id = $2 AND d.lane = $3 AND d.fence = $4 AND d.lease_session = $1
      AND EXISTS (SELECT 1 FROM live_session)
    RETURNING d.machine_id, d.lane, d.fence, $1::UUID AS session_id),
deleted_work AS (
    DELETE FROM work w USING released_lease f WHERE w.machine_id = f.machine_id AND w.lane = f.lane
    RETURNING w.machine_id, w.lane, w.fence, w.process, w.session_id),
history_row AS (
    INSERT INTO history (machine_id, at, event, edge, lane, fence, process, session_id, detail)
    SELECT machine_id, clock_timestamp(), 'Cancelled', 'end', lane, fence, process, session_id, $5
    FROM deleted_work),
resolved_intent AS (
    UPDATE intent i
    SET settled_at = clock_timestamp(), outcome = 'unknown: the work was cancelled in the middle'
    FROM released_lease f
    WHERE i.machine_id = f.machine_id AND i.session_id = f.session_id AND i.fence = f.fence
      AND i.settled_at IS NULL)
SELECT count(*) AS "cancelled!" FROM released_lease
