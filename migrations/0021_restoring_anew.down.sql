ALTER TABLE cluster DROP COLUMN away_since;
DROP TABLE cluster_left_node;
