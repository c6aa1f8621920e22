SELECT intent_id, detail, machine_id, begun_at,
       (EXTRACT(EPOCH FROM clock_timestamp() - begun_at) * 1000)::INT8 AS "age_ms!"
FROM intent
WHERE provider = $1 AND kind = 'create' AND settled_at IS NULL
ORDER BY begun_at
