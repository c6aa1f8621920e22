INSERT INTO cluster_snapshot (snapshot_id, cluster_id, taken_at, why, revision, epoch, bytes, nodes, members, voters,
                              digest)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
