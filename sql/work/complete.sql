-- Complete a work item: write its due row as it is due next, release the lease, and record the end in
-- history. Losses and the pause after them are cleared, because a session got through. The rows are locked
-- already, each table is changed once, and each part acts on what the one before it changed.
WITH released_lease AS (
    UPDATE machine_due
    SET process = $5, provider = $6, priority = $7, ready_at = $8, timer = $9, reason = $10, decided_at = $11,
        deadline = $12,
        phase_since = CASE WHEN phase_index = $13 THEN phase_since ELSE clock_timestamp() END,
        phase_index = $13, rules_version = $14, policy_version = $15, version = version + 1,
        lease_session = NULL, losses = 0, not_before = NULL
    WHERE machine_id = $1 AND lane = $2 AND lease_session = $3 AND fence = $4
    RETURNING machine_id, lane, fence),
deleted_work AS (
    DELETE FROM work w USING released_lease f
    WHERE w.machine_id = f.machine_id AND w.lane = f.lane AND w.session_id = $3 AND w.fence = f.fence
    RETURNING w.machine_id, w.lane, w.fence),
history_row AS (
    INSERT INTO history (machine_id, at, event, edge, lane, fence, process, session_id, detail)
    SELECT machine_id, clock_timestamp(), $16, 'end', lane, fence, $17, $3, $18
    FROM deleted_work)
SELECT count(*) AS "ended!" FROM deleted_work
