-- Withdraw the open release orders of a roll-out, so that machines that have not started with the release no
-- longer receive them.
UPDATE release_order o SET withdrawn = TRUE
FROM roll_out_machine m
WHERE m.roll_out_id = $1 AND m.state = 'ordered' AND o.machine_id = m.machine_id AND o.generation = m.generation
