-- What has not begun is not begun any more.
UPDATE roll_out_machine
SET active = FALSE, state = CASE WHEN state = 'waiting' THEN 'skipped' ELSE state END
WHERE roll_out_id = $1
