-- Each cluster, as far as it is counted.
SELECT k.deleting_at IS NOT NULL AS "deleting!", k.founded_at IS NOT NULL AS "founded!",
       k.restoring_since IS NOT NULL AS "restoring!", k.settled, k.seen_at, clock_timestamp() AS "now!",
       (SELECT count(*) FROM machine_cluster m WHERE m.cluster_id = k.cluster_id) AS "machines!",
       (SELECT max(s.taken_at) FROM cluster_snapshot s WHERE s.cluster_id = k.cluster_id) AS snapshot_at
FROM cluster k
