-- List one page of the machines in some phases of a provider, in the order of lists (list_machine_names.sql). All of them
-- are read and sorted, so this is for phases with few machines. Machines without a provider have no id, and are read in
-- the order of their UUIDs from $3.
SELECT d.machine_id AS "machine_id!", p.provider_id AS "provider_id?", d.phase_index AS "phase?"
FROM unnest($2::TEXT[]) one (phase)
CROSS JOIN LATERAL (
    SELECT e.machine_id, e.phase_index FROM machine_due e
    WHERE e.lane = 'access' AND e.phase_index = one.phase AND e.provider = $1 AND e.machine_id > $3
    ORDER BY e.machine_id
    LIMIT $4) d
LEFT JOIN LATERAL (
    SELECT f.provider_id,
           regexp_replace(regexp_replace(left(f.provider_id, 100),
               '([0-9]+)', '00000000000000000000\1', 'g'), '0*([0-9]{20,})', '\1', 'g') COLLATE "C" AS name_key
    FROM machine_provided f WHERE f.machine_id = d.machine_id LIMIT 1) p ON true
WHERE (coalesce(p.name_key, ''), d.machine_id)
    > (regexp_replace(regexp_replace(left($5::TEXT, 100),
           '([0-9]+)', '00000000000000000000\1', 'g'), '0*([0-9]{20,})', '\1', 'g') COLLATE "C", $6::UUID)
ORDER BY coalesce(p.name_key, ''), d.machine_id
LIMIT $7
