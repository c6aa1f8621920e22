-- List the clusters that were founded and are not being deleted, with when the last snapshot of each was
-- taken and since when it rejects the shepherd's keys.
SELECT c.name, c.founded_at AS "founded_at!", c.keys_refused_since,
       (SELECT max(s.taken_at) FROM cluster_snapshot s WHERE s.cluster_id = c.cluster_id) AS taken_at
FROM cluster c
WHERE c.founded_at IS NOT NULL AND c.deleting_at IS NULL
ORDER BY c.name
