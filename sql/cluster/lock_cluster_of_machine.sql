-- Lock the cluster of a machine that may be disrupted, so that of two machines of one cluster only one is
-- disrupted. The due rows of the machine are locked before this.
SELECT k.cluster_id, k.name FROM machine_cluster c JOIN cluster k ON k.cluster_id = c.cluster_id
WHERE c.machine_id = $1
FOR UPDATE OF k
