-- List the machines with this provider id, of one provider or of any. The providers are found by skipping
-- through the index, so that the cost does not grow with the fleet.
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
-- LIMIT, although the two are unique: it keeps the planner, which cannot know how few providers exist, from
-- reading all machines to join them.
CROSS JOIN LATERAL (
    SELECT q.machine_id, q.provider, q.provider_id FROM machine_provided q
    WHERE q.provider = provider_name.provider AND q.provider_id = $2
    LIMIT 1) p
WHERE $1::TEXT IS NULL OR provider_name.provider = $1
ORDER BY p.provider
LIMIT $3
