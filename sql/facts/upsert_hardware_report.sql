INSERT INTO machine_hardware_report (machine_id, received_at, incarnation, report, manufacturer, product,
    serial_number, memory_bytes, cpu_threads)
VALUES ($1, clock_timestamp(), $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (machine_id) DO UPDATE
SET received_at = EXCLUDED.received_at, incarnation = EXCLUDED.incarnation, report = EXCLUDED.report,
    manufacturer = EXCLUDED.manufacturer, product = EXCLUDED.product, serial_number = EXCLUDED.serial_number,
    memory_bytes = EXCLUDED.memory_bytes, cpu_threads = EXCLUDED.cpu_threads
