SELECT row_to_json(t) FROM {table} t WHERE t.machine_id = $1
