-- Read the upgrade of a cluster that is under way, or else the newest one, with the state of its roll-out and
-- any other roll-out that has ordered one of the cluster's machines.
SELECT u.upgrade_id, u.from_bundle, u.from_version, u.to_bundle, u.to_version, u.roll_out_id, u.release, u.released, u.back,
       u.parallelism, u.deadline_seconds, u.created_at, u.created_by, u.reason, u.paused, u.ended_at, u.ended,
       u.requested_nodes, r.roll_out_id IS NOT NULL AS "roll_out_exists!",
       r.paused AS "roll_out_paused?", r.ended AS "roll_out_ended?",
       (SELECT count(*) FROM roll_out_machine m WHERE m.roll_out_id = u.roll_out_id AND m.state = 'failed') AS "failed!",
       (SELECT m.roll_out_id FROM roll_out_machine m JOIN machine_cluster c ON c.machine_id = m.machine_id
        WHERE c.cluster_id = u.cluster_id AND m.active AND m.state = 'ordered'
          AND m.roll_out_id IS DISTINCT FROM u.roll_out_id
        ORDER BY m.roll_out_id LIMIT 1) AS elsewhere
FROM cluster_upgrade u
LEFT JOIN roll_out r ON r.roll_out_id = u.roll_out_id
WHERE u.cluster_id = $1
ORDER BY u.ended_at IS NOT NULL, u.created_at DESC, u.upgrade_id
LIMIT 1
