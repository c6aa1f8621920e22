DROP TABLE fleet_sample;
