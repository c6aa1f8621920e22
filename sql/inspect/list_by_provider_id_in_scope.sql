-- List the machines with this provider id, of these providers. Each one is looked up through the index.
SELECT p.machine_id AS "machine_id!", p.provider AS "provider!", p.provider_id AS "provider_id!"
FROM unnest($1::TEXT[]) one (provider)
CROSS JOIN LATERAL (
    SELECT q.machine_id, q.provider, q.provider_id FROM machine_provided q
    WHERE q.provider = one.provider AND q.provider_id = $2
    LIMIT 1) p
ORDER BY p.provider
LIMIT $3
