DROP TABLE log_part;
DROP TABLE log_request;
