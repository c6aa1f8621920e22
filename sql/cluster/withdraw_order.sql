-- Withdraw the cluster order of a machine, whatever the machine reports.
UPDATE cluster_order SET sealed = NULL WHERE machine_id = $1
