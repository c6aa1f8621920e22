-- List the machines with one of these provider ids, of any provider. The providers are found by skipping through the
-- index, and each id is looked up at each of them, so that the cost does not grow with the fleet.
WITH RECURSIVE provider_name AS (
    (SELECT p.provider FROM machine_provided p ORDER BY p.provider LIMIT 1)
    UNION ALL
    SELECT n.provider
    FROM provider_name
    CROSS JOIN LATERAL (
        SELECT p.provider FROM machine_provided p WHERE p.provider > provider_name.provider
        ORDER BY p.provider LIMIT 1) n)
SELECT p.machine_id AS "machine_id!", p.provider AS "provider!", p.provider_id AS "provider_id!"
FROM provider_name
CROSS JOIN unnest($1::TEXT[]) one (provider_id)
CROSS JOIN LATERAL (
    SELECT q.machine_id, q.provider, q.provider_id FROM machine_provided q
    WHERE q.provider = provider_name.provider AND q.provider_id = one.provider_id
    LIMIT 1) p
