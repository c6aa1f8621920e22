-- Find a cluster that uses this bundle: as its Kubernetes, as an add-on, or as the source or target of an
-- upgrade that has not ended.
SELECT c.name, CASE WHEN k.bundle = $1 THEN 'bundle' ELSE 'add-on' END AS "what!"
FROM cluster_kubernetes k JOIN cluster c USING (cluster_id)
WHERE k.bundle = $1
   OR EXISTS (SELECT 1 FROM jsonb_each_text(k.add_ons) a WHERE a.value = encode($1, 'hex'))
UNION ALL
SELECT c.name, 'upgrade'
FROM cluster_upgrade u JOIN cluster c USING (cluster_id)
WHERE u.ended_at IS NULL AND (u.from_bundle = $1 OR u.to_bundle = $1)
ORDER BY 1
LIMIT 1
