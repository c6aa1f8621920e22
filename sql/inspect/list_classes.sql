-- List every (phase, provider) that a machine is in, by skipping through the index.
WITH RECURSIVE class AS (
    (SELECT d.phase_index, d.provider FROM machine_due d WHERE d.lane = 'access'
     ORDER BY d.phase_index, d.provider LIMIT 1)
    UNION ALL
    SELECT n.phase_index, n.provider
    FROM class
    CROSS JOIN LATERAL (
        SELECT d.phase_index, d.provider FROM machine_due d
        WHERE d.lane = 'access' AND (d.phase_index, d.provider) > (class.phase_index, class.provider)
        ORDER BY d.phase_index, d.provider LIMIT 1) n)
SELECT phase_index AS "phase_index!", provider AS "provider!" FROM class
