-- Delete the records of listening: those in the backup are of another time.
DELETE FROM fleet_listening RETURNING shard
