-- It is not asked any more, whatever the machine says.
UPDATE cluster_order SET sealed = NULL WHERE machine_id = $1
