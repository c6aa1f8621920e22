-- Read the state of the shepherd's keys for a cluster, and how far back its snapshots go.
SELECT COALESCE(c.key_since, c.founded_at, c.created_at) AS "since!", c.key_rotation_requested_at,
       c.key_rotation_requested_by, c.key_next, c.key_next_at, c.keys_refused_since,
       (SELECT min(s.taken_at) FROM cluster_snapshot s WHERE s.cluster_id = c.cluster_id) AS oldest_snapshot
FROM cluster c WHERE c.cluster_id = $1
