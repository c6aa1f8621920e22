INSERT INTO cluster_order (machine_id, generation, what, sealed, ordered_at)
VALUES ($1, $2, $3, $4, clock_timestamp())
ON CONFLICT (machine_id) DO UPDATE
SET generation = EXCLUDED.generation, what = EXCLUDED.what, sealed = EXCLUDED.sealed, ordered_at = EXCLUDED.ordered_at
