SELECT t.machine_id FROM {table} t WHERE t.machine_id = ANY ($1)
