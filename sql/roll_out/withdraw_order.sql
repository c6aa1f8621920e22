-- Withdraw the release order of a machine that the roll-out no longer waits for.
UPDATE release_order o SET withdrawn = TRUE
FROM roll_out_machine m
WHERE m.roll_out_id = $1 AND m.machine_id = $2 AND o.machine_id = m.machine_id AND o.generation = m.generation
