DROP INDEX machine_provided_order;
