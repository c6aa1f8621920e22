SELECT coalesce(max(version), 0)::INT8 FROM _sqlx_migrations WHERE success
