-- Find which of these machines have a row in a table. They are looked up one by one, however many they are.
SELECT t.machine_id
FROM unnest($1::UUID[]) one (machine_id)
CROSS JOIN LATERAL (SELECT f.machine_id FROM {table} f WHERE f.machine_id = one.machine_id LIMIT 1) t
