INSERT INTO bmdb_identity (singleton, bmdb_id, created_at) VALUES (TRUE, $1, clock_timestamp())
ON CONFLICT (singleton) DO NOTHING
