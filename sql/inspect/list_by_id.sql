-- List the machines whose ids lie in a range: one id, or all ids that begin alike.
SELECT m.machine_id, p.provider AS "provider?", p.provider_id AS "provider_id?"
FROM machine m
LEFT JOIN machine_provided p ON p.machine_id = m.machine_id
WHERE m.machine_id BETWEEN $1 AND $2
ORDER BY m.machine_id
LIMIT $3
