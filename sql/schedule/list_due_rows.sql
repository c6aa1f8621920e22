-- List the due rows of a page of machines, without locks.
SELECT machine_id, lane, process, provider, priority, ready_at, timer, reason, deadline, phase_index,
       phase_since, rules_version, policy_version, lease_session, fence
FROM machine_due
WHERE machine_id = ANY ($1)
ORDER BY machine_id, lane
