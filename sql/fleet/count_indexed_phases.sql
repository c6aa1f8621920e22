-- The indexed phases, for progress and lists; the truth is machine_phase.
SELECT phase_index AS phase, count(*) AS "count!" FROM machine_due WHERE lane = 'access' GROUP BY phase_index
