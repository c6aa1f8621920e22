INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
                     created_by, wait_reasons, settled, secret_keys)
VALUES ($1, $2, $3, $4, $5, $6, $7, 1, clock_timestamp(), $8, '[]', FALSE, $9)
ON CONFLICT (name) DO NOTHING
RETURNING cluster_id
