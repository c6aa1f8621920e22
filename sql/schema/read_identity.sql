SELECT bmdb_id FROM bmdb_identity
