-- Clusters that were founded and are to stay, when the last snapshot of each was taken, and since when they refuse us.
SELECT c.name, c.founded_at AS "founded_at!", c.keys_refused_since,
       (SELECT max(s.taken_at) FROM cluster_snapshot s WHERE s.cluster_id = c.cluster_id) AS taken_at
FROM cluster c
WHERE c.founded_at IS NOT NULL AND c.deleting_at IS NULL
ORDER BY c.name
