INSERT INTO machine_labels (machine_id, labels) VALUES ($1, $2)
ON CONFLICT (machine_id) DO UPDATE SET labels = EXCLUDED.labels
