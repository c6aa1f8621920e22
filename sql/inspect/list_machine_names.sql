-- List one page of the machines of a provider in the order of lists: by the provider's id with numbers by value, then by
-- UUID. The expression is that of the index machine_provided_order. The phase of each is looked up for its row.
SELECT p.machine_id AS "machine_id!", p.provider_id AS "provider_id?", d.phase_index AS "phase?"
FROM (
    SELECT q.machine_id, q.provider_id,
           regexp_replace(regexp_replace(left(q.provider_id, 100),
               '([0-9]+)', '00000000000000000000\1', 'g'), '0*([0-9]{20,})', '\1', 'g') COLLATE "C" AS name_key
    FROM machine_provided q
    WHERE q.provider = $1
      AND (regexp_replace(regexp_replace(left(q.provider_id, 100),
               '([0-9]+)', '00000000000000000000\1', 'g'), '0*([0-9]{20,})', '\1', 'g') COLLATE "C", q.machine_id)
        > (regexp_replace(regexp_replace(left($2::TEXT, 100),
               '([0-9]+)', '00000000000000000000\1', 'g'), '0*([0-9]{20,})', '\1', 'g') COLLATE "C", $3::UUID)
    ORDER BY name_key, q.machine_id
    LIMIT $4) p
LEFT JOIN LATERAL (SELECT f.phase_index FROM machine_due f
                   WHERE f.machine_id = p.machine_id AND f.lane = 'access' LIMIT 1) d ON true
ORDER BY p.name_key, p.machine_id
