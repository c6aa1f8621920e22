-- End the machines of a roll-out: one that is still waiting counts as skipped.
UPDATE roll_out_machine
SET active = FALSE, state = CASE WHEN state = 'waiting' THEN 'skipped' ELSE state END
WHERE roll_out_id = $1
