-- Forget the orders of the control plane of a cluster: the last ones have the key of its authority. A machine that has
-- followed needs none, whether it has reported on the last one or not. Any other one gets another order. An order to leave
-- has no key.
UPDATE cluster_order
SET sealed = NULL
WHERE what = 'join'
  AND machine_id IN (SELECT machine_id FROM machine_cluster WHERE cluster_id = $1 AND part = 'control-plane')
