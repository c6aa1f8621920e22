DROP TABLE machine_power_order;
