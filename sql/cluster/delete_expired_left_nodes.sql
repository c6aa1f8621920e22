-- Delete the keys of nodes whose machines are out of the cluster, once no retained snapshot is from before
-- they left.
DELETE FROM cluster_left_node n
WHERE n.cluster_id = $1
  AND n.left_at < (SELECT min(s.taken_at) FROM cluster_snapshot s WHERE s.cluster_id = $1)
  AND NOT EXISTS (SELECT 1 FROM machine_cluster c WHERE c.machine_id = n.machine_id AND c.cluster_id = $1)
