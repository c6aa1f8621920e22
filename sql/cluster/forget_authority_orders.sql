-- Forget the orders that the control plane of a cluster has reported on: the last ones have the key of its authority.
UPDATE cluster_order
SET sealed = NULL
WHERE machine_id IN
    (SELECT c.machine_id FROM machine_cluster c
     JOIN machine_cluster_report r ON r.machine_id = c.machine_id
     WHERE c.cluster_id = $1 AND c.part = 'control-plane' AND r.generation >= cluster_order.generation)
