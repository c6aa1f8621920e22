DROP VIEW machine_snapshot;
DROP TABLE brake;
DROP TABLE intent;
DROP TABLE history;
DROP TABLE work;
DROP TABLE machine_due;
