-- What the backup says of being heard is of another time.
DELETE FROM fleet_listening RETURNING shard
