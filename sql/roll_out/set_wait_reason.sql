-- Set what each of these machines waits for.
UPDATE roll_out_machine m SET message = n.message
FROM unnest($2::UUID[], $3::TEXT[]) AS n (machine_id, message)
WHERE m.roll_out_id = $1 AND m.machine_id = n.machine_id AND m.message IS DISTINCT FROM n.message
