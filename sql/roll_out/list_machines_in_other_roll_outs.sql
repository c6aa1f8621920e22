-- List those of these machines that are in a roll-out already.
SELECT m.machine_id, m.roll_out_id FROM roll_out_machine m WHERE m.active AND m.machine_id = ANY ($1)
ORDER BY m.machine_id LIMIT 5
