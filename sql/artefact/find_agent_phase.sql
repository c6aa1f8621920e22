-- Find the phase of a machine whose agent has this key. The caller rejects a machine without such an agent,
-- and one that is retired.
SELECT d.phase_index AS phase
FROM machine_agent_started s
JOIN machine_due d ON d.machine_id = s.machine_id AND d.lane = 'access'
WHERE s.machine_id = $1 AND s.public_key = $2
