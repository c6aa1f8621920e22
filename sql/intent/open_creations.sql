SELECT intent_id, detail, machine_id, begun_at FROM intent
WHERE provider = $1 AND kind = 'create' AND settled_at IS NULL
ORDER BY begun_at
