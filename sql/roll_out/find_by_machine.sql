-- Find the roll-out that a machine is in now.
SELECT o.roll_out_id, o.release, o.paused, m.state, m.message
FROM roll_out_machine m JOIN roll_out o ON o.roll_out_id = m.roll_out_id
WHERE m.machine_id = $1 AND m.active
