-- List, for "did you mean", the ids that follow a text in each provider.
WITH RECURSIVE provider_name AS (
    (SELECT p.provider FROM machine_provided p ORDER BY p.provider LIMIT 1)
    UNION ALL
    SELECT n.provider
    FROM provider_name
    CROSS JOIN LATERAL (
        SELECT p.provider FROM machine_provided p WHERE p.provider > provider_name.provider
        ORDER BY p.provider LIMIT 1) n)
SELECT p.machine_id AS "machine_id!", p.provider AS "provider?", p.provider_id AS "provider_id?"
FROM provider_name
CROSS JOIN LATERAL (
    SELECT q.machine_id, q.provider, q.provider_id FROM machine_provided q
    WHERE q.provider = provider_name.provider AND q.provider_id >= $1
    ORDER BY q.provider_id LIMIT $2) p
ORDER BY p.provider_id, p.provider
LIMIT $2
