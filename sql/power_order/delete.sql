DELETE FROM machine_power_order WHERE machine_id = $1
