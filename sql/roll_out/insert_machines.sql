INSERT INTO roll_out_machine (roll_out_id, machine_id, state, changed_at, active)
SELECT $1, machine_id, 'waiting', clock_timestamp(), TRUE FROM unnest($2::UUID[]) AS n (machine_id)
