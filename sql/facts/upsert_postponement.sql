INSERT INTO work_postponed (machine_id, process, until, reason, decided_at) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (machine_id, process) DO UPDATE
SET until = EXCLUDED.until, reason = EXCLUDED.reason, decided_at = EXCLUDED.decided_at
