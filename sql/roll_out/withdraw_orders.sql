-- Machines that have not begun with it are asked no more.
UPDATE release_order o SET withdrawn = TRUE
FROM roll_out_machine m
WHERE m.roll_out_id = $1 AND m.state = 'ordered' AND o.machine_id = m.machine_id AND o.generation = m.generation
