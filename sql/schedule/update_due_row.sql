UPDATE machine_due
SET process = $3, provider = $4, priority = $5, ready_at = $6, timer = $7, reason = $8, decided_at = $9,
    deadline = $10,
    phase_since = CASE WHEN phase_index = $11 THEN phase_since ELSE clock_timestamp() END,
    phase_index = $11, rules_version = $12, policy_version = $13, version = version + 1
WHERE machine_id = $1 AND lane = $2
