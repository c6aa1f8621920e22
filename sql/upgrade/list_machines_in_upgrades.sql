-- List those of these machines whose cluster is being upgraded.
SELECT m.machine_id, c.name
FROM machine_cluster m JOIN cluster c USING (cluster_id) JOIN cluster_upgrade u USING (cluster_id)
WHERE u.ended_at IS NULL AND m.machine_id = ANY ($1)
ORDER BY m.machine_id LIMIT 5
