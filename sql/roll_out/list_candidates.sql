-- List a page of machines that are neither retiring nor retired, with the values that a selector matches.
SELECT d.machine_id, p.provider, p.provider_id, p.location, h.manufacturer AS "manufacturer?",
       h.product AS "product?", h.memory_bytes AS "memory_bytes?", h.cpu_threads AS "cpu_threads?",
       l.labels AS "labels?", d.phase_index
FROM machine_due d
JOIN machine_provided p ON p.machine_id = d.machine_id
LEFT JOIN machine_hardware_report h ON h.machine_id = d.machine_id
LEFT JOIN machine_labels l ON l.machine_id = d.machine_id
WHERE d.lane = 'access' AND d.phase_index NOT IN ('Retiring', 'Retired') AND d.machine_id > $1
ORDER BY d.machine_id
LIMIT $2
