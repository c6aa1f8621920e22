INSERT INTO machine_recovery (machine_id, started_at, rung, tries, step, acted_at, deadline, boot_id_before,
    next_at, note, obstacle)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
ON CONFLICT (machine_id) DO UPDATE
SET rung = EXCLUDED.rung, tries = EXCLUDED.tries, step = EXCLUDED.step, acted_at = EXCLUDED.acted_at,
    deadline = EXCLUDED.deadline, boot_id_before = EXCLUDED.boot_id_before, next_at = EXCLUDED.next_at,
    note = EXCLUDED.note, obstacle = EXCLUDED.obstacle
