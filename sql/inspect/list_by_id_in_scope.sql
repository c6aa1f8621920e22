-- List the machines of these providers whose ids lie in a range. Each phase of each provider is looked up
-- through the index of lists, so that machines of other providers cost nothing and take no place in the
-- result.
WITH RECURSIVE phase AS (
    (SELECT d.phase_index FROM machine_due d WHERE d.lane = 'access' ORDER BY d.phase_index LIMIT 1)
    UNION ALL
    SELECT n.phase_index
    FROM phase
    CROSS JOIN LATERAL (
        SELECT d.phase_index FROM machine_due d
        WHERE d.lane = 'access' AND d.phase_index > phase.phase_index
        ORDER BY d.phase_index LIMIT 1) n)
SELECT p.machine_id AS "machine_id!", p.provider AS "provider!", p.provider_id AS "provider_id!"
FROM phase
CROSS JOIN unnest($1::TEXT[]) one (provider)
CROSS JOIN LATERAL (
    SELECT e.machine_id FROM machine_due e
    WHERE e.lane = 'access' AND e.phase_index = phase.phase_index AND e.provider = one.provider
      AND e.machine_id BETWEEN $2 AND $3
    ORDER BY e.machine_id LIMIT $4) d
CROSS JOIN LATERAL (
    SELECT q.machine_id, q.provider, q.provider_id FROM machine_provided q
    WHERE q.machine_id = d.machine_id AND q.provider = one.provider
    LIMIT 1) p
ORDER BY p.machine_id
LIMIT $4
