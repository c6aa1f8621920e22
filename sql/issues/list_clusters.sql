-- List the clusters that were founded and are not being deleted, with when the last snapshot of each was
-- taken, since when it rejects the shepherd's keys, the size of its etcd, since when none of its curators answers, and the
-- replacement of its authority.
SELECT c.name, c.founded_at AS "founded_at!", c.keys_refused_since, c.etcd_bytes,
       (SELECT max(s.taken_at) FROM cluster_snapshot s WHERE s.cluster_id = c.cluster_id) AS taken_at,
       c.unreachable_since, c.authority_rotation, c.authority_rotation_ordered_at, c.authority_rotation_ordered_by,
       c.authority_rotation_from, c.authority_rotation_progress
FROM cluster c
WHERE c.founded_at IS NOT NULL AND c.deleting_at IS NULL
ORDER BY c.name
