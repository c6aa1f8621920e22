-- The cluster of a machine, as far as it decides about disturbing it; locked, so that of two machines of one cluster one is
-- disturbed. The due rows of the machine are locked before.
SELECT k.cluster_id, k.name FROM machine_cluster c JOIN cluster k ON k.cluster_id = c.cluster_id
WHERE c.machine_id = $1
FOR UPDATE OF k
