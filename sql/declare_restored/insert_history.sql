INSERT INTO history (machine_id, at, event, detail)
SELECT machine_id, clock_timestamp(), 'Restored', $2 FROM unnest($1::UUID[]) AS named (machine_id)
