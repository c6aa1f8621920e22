INSERT INTO machine_power_order (machine_id, switch, reason, ordered_by, ordered_at)
VALUES ($1, $2, $3, $4, clock_timestamp())
ON CONFLICT (machine_id) DO NOTHING
