-- Read where a takeover put the program of a machine, and what its agent finds wrong with how it runs.
SELECT a.placement AS "placement?", p.findings AS "findings?"
FROM machine_agent_started a
LEFT JOIN machine_release_report p ON p.machine_id = a.machine_id
WHERE a.machine_id = $1
