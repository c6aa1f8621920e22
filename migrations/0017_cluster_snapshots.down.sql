ALTER TABLE cluster DROP COLUMN snapshot_asked_at;
DROP TABLE cluster_snapshot_chunk;
DROP TABLE cluster_snapshot;
