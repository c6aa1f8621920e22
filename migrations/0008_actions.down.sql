DELETE FROM named_lease WHERE kind = 'budget' AND name = 'orders';
DROP TABLE machine_labels;
DROP TABLE loop_pause;
