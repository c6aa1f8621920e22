-- List the values of each cluster that are counted.
SELECT k.deleting_at IS NOT NULL AS "deleting!", k.founded_at IS NOT NULL AS "founded!",
       k.restoring_since IS NOT NULL AS "restoring!", k.settled AS "settled!", k.observed_at,
       clock_timestamp() AS "now!",
       (SELECT count(*) FROM machine_cluster m WHERE m.cluster_id = k.cluster_id) AS "machines!",
       (SELECT max(s.taken_at) FROM cluster_snapshot s WHERE s.cluster_id = k.cluster_id) AS snapshot_at,
       x.cluster_id IS NOT NULL AS "kubernetes!",
       (SELECT max(jsonb_array_length(r.value -> 'waits_for'))
        FROM jsonb_array_elements(x.observed -> 'rotations') r) AS behind,
       (SELECT count(*) FROM machine_cluster m, jsonb_array_elements(m.kubernetes -> 'components') c
        WHERE m.cluster_id = k.cluster_id AND m.leaving IS NULL AND c.value ->> 'state' <> 'healthy') AS "unwell!",
       (SELECT u.paused IS NOT NULL FROM cluster_upgrade u WHERE u.cluster_id = k.cluster_id AND u.ended_at IS NULL) AS paused
FROM cluster k
LEFT JOIN cluster_kubernetes x ON x.cluster_id = k.cluster_id
