-- Lock a cluster, by its name, for a change of its desired state.
SELECT cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at, created_by,
       deleting_at, deleting_by
FROM cluster WHERE name = $1
FOR UPDATE
