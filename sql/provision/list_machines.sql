-- List the machines of a provider that are in the BMDB.
SELECT p.machine_id, p.provider_id, p.status, q.reason AS "quarantine?", t.requested_at AS "retirement?",
       t.finished_at AS "retired?", t.listed_since AS "listed_since?"
FROM machine_provided p
LEFT JOIN machine_quarantine q ON q.machine_id = p.machine_id
LEFT JOIN machine_retirement t ON t.machine_id = p.machine_id
WHERE p.provider = $1
ORDER BY p.provider_id
