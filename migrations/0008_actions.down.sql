DROP TABLE loop_pause;
