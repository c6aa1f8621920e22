-- Add a machine to a cluster, unless it already is in one: of two clusters that choose it at once, one gets
-- it.
INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
VALUES ($1, $2, $3, clock_timestamp())
ON CONFLICT (machine_id) DO NOTHING
RETURNING machine_id
