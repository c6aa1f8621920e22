INSERT INTO machine_due (machine_id, lane, process, provider, priority, bucket, ready_at, timer, reason,
    decided_at, deadline, phase_index, phase_since, rules_version, policy_version, version, fence, losses)
VALUES ($1, $2, NULL, $3, 1, $4, NULL, FALSE, 'newly provided', '', NULL, 'New', clock_timestamp(), $5, 0, 0, 0, 0)
