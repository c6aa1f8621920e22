DROP TABLE machine_key_replacement;
