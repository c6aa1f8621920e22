-- Machines with this provider's id, of one provider or of any. The providers are found by skipping
-- through the index, so that the cost does not grow with the fleet.
WITH RECURSIVE name AS (
    (SELECT p.provider FROM machine_provided p ORDER BY p.provider LIMIT 1)
    UNION ALL
    SELECT n.provider
    FROM name
    CROSS JOIN LATERAL (
        SELECT p.provider FROM machine_provided p WHERE p.provider > name.provider
        ORDER BY p.provider LIMIT 1) n)
SELECT p.machine_id, p.provider AS "provider?", p.provider_id AS "provider_id?"
FROM name
JOIN machine_provided p ON p.provider = name.provider AND p.provider_id = $2
WHERE $1::TEXT IS NULL OR p.provider = $1
ORDER BY p.provider
LIMIT $3
