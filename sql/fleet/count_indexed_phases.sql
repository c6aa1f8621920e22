-- Count the machines in each indexed phase, for progress and lists. The facts are authoritative
-- (count_phases.sql).
SELECT phase_index AS phase, count(*) AS "count!" FROM machine_due WHERE lane = 'access' GROUP BY phase_index
