-- List the clusters that were founded and are not being deleted, with when the last snapshot of each was taken, and the last
-- one with an image of etcd, since when it has Kubernetes and rejects the shepherd's keys, the size and the quota of its etcd,
-- since when that is full, since when none of its curators answers, and the replacement of its authority.
SELECT c.cluster_id, c.name, c.founded_at AS "founded_at!", c.keys_refused_since, c.etcd_bytes, c.etcd_quota_bytes,
       c.etcd_full_since,
       (SELECT max(s.taken_at) FROM cluster_snapshot s WHERE s.cluster_id = c.cluster_id) AS taken_at,
       (SELECT max(s.taken_at) FROM cluster_snapshot s
        JOIN cluster_image i ON i.snapshot_id = s.snapshot_id AND i.completed_at IS NOT NULL
        WHERE s.cluster_id = c.cluster_id) AS image_at,
       k.requested_at AS "kubernetes_since?",
       c.unreachable_since, c.authority_rotation, c.authority_rotation_ordered_at, c.authority_rotation_ordered_by,
       c.authority_rotation_from, c.authority_rotation_progress, c.authority_replacements, c.secret_keys
FROM cluster c
LEFT JOIN cluster_kubernetes k ON k.cluster_id = c.cluster_id AND k.removing_by IS NULL
WHERE c.founded_at IS NOT NULL AND c.deleting_at IS NULL
ORDER BY c.name
