-- Clusters that were founded and are to stay, and when the last snapshot of each was taken.
SELECT c.name, c.founded_at AS "founded_at!", max(s.taken_at) AS taken_at
FROM cluster c
LEFT JOIN cluster_snapshot s ON s.cluster_id = c.cluster_id
WHERE c.founded_at IS NOT NULL AND c.deleting_at IS NULL
GROUP BY c.name, c.founded_at
ORDER BY c.name
