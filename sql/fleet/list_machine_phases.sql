-- List every machine's indexed phase and what it waits for, for an operator who watches a small fleet.
SELECT coalesce(p.provider_id, d.machine_id::text) AS "name!", d.phase_index AS phase, d.reason,
       d.phase_since AS since, clock_timestamp() AS "now!"
FROM machine_due d
LEFT JOIN machine_provided p ON p.machine_id = d.machine_id
WHERE d.lane = 'access'
ORDER BY 1
