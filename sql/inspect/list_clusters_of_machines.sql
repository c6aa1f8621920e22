-- List the clusters of these machines, looked up one by one.
SELECT m.machine_id AS "machine_id!", c.name AS "name!"
FROM unnest($1::UUID[]) one (machine_id)
CROSS JOIN LATERAL (SELECT * FROM machine_cluster f WHERE f.machine_id = one.machine_id LIMIT 1) m
CROSS JOIN LATERAL (SELECT * FROM cluster f WHERE f.cluster_id = m.cluster_id LIMIT 1) c
