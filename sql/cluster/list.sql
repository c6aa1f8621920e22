-- List every cluster, or the one with this name, with its last snapshot and the one that it is being restored
-- from.
SELECT c.cluster_id, c.name, c.control_plane, c.workers, c.selector, c.roles, c.approval, c.version, c.created_at,
       c.created_by, c.deleting_at, c.deleting_by, c.founded_at, c.ca_certificate, c.curators, c.polled_at,
       c.observed_at, c.unreachable_since, c.wait_reasons, c.settled, c.voters, c.voters_reached, c.snapshot_requested_at,
       c.etcd_full_since, c.epoch, c.restored_at, c.restoring_since, c.restoring_by, c.restoring_onto, c.restoring_from,
       COALESCE(c.key_since, c.founded_at) AS key_since, c.key_rotation_requested_by, c.keys_refused_since,
       c.peer_renewal_requested_at, c.peer_renewal_requested_by,
       c.authority_rotation, c.authority_rotation_ordered_at, c.authority_rotation_ordered_by, c.authority_rotation_from,
       c.authority_rotation_progress, c.authority_rotation_step, c.authority_rotation_certificate,
       c.authority_rotation_since, c.secret_keys,
       (SELECT min(e.taken_at) FROM cluster_snapshot e WHERE e.cluster_id = c.cluster_id) AS oldest_snapshot,
       s.snapshot_id AS "snapshot_id?", s.taken_at AS "taken_at?", s.voters AS "snapshot_voters?",
       s.authority AS "snapshot_authority?",
       EXISTS (SELECT 1 FROM cluster_image i
               WHERE i.snapshot_id = s.snapshot_id AND i.completed_at IS NOT NULL) AS "snapshot_has_image!",
       f.digest AS "from_digest?", c.restoring_with_image,
       g.digest AS "image_digest?", g.etcd_version AS "image_etcd_version?"
FROM cluster c
LEFT JOIN cluster_snapshot s ON s.snapshot_id =
    (SELECT n.snapshot_id FROM cluster_snapshot n WHERE n.cluster_id = c.cluster_id
     ORDER BY n.taken_at DESC, n.snapshot_id LIMIT 1)
LEFT JOIN cluster_snapshot f ON f.snapshot_id = c.restoring_from
LEFT JOIN cluster_image g ON g.snapshot_id = c.restoring_from AND g.completed_at IS NOT NULL
WHERE $1::TEXT IS NULL OR c.name = $1
ORDER BY c.name
