-- Lock the due rows of a machine, as lock_due_rows.sql does, for a session that is live: the session's row
-- first, then the machine's, in one statement. No row is returned when the session is over, or when the
-- machine does not exist.
WITH live_session AS MATERIALIZED (
    SELECT session_id FROM session
    WHERE session_id = $1 AND closed_at IS NULL AND deadline > clock_timestamp()
    FOR KEY SHARE)
SELECT machine_id, lane, process, provider, priority, ready_at, timer, reason, deadline, phase_index,
       phase_since, rules_version, policy_version, lease_session, fence
FROM machine_due
WHERE machine_id = $2 AND EXISTS (SELECT 1 FROM live_session)
ORDER BY lane
FOR UPDATE
