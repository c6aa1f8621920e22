INSERT INTO cluster_snapshot_chunk (snapshot_id, number, sealed) VALUES ($1, $2, $3)
