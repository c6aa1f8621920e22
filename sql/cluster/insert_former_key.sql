INSERT INTO cluster_former_key (cluster_id, public_key, replaced_at) VALUES ($1, $2, clock_timestamp())
ON CONFLICT (cluster_id, public_key) DO NOTHING
