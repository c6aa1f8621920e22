SELECT cluster_id, name FROM cluster ORDER BY cluster_id
