DROP TABLE machine_priority;
