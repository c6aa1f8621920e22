-- Lock the due rows of both lanes of a machine, in lane order, before any fact is read. A fact that changes
-- while this statement waits is then seen, and no other transaction can change one until this transaction
-- ends.
SELECT machine_id, lane, process, provider, priority, ready_at, timer, reason, deadline, phase_index,
       phase_since, rules_version, policy_version, lease_session, fence
FROM machine_due
WHERE machine_id = $1
ORDER BY lane
FOR UPDATE
