DROP TABLE roll_out_machine;
DROP TABLE roll_out;
DROP TABLE machine_release_report;
DROP TABLE release_order;
