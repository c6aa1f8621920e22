-- Create a database. {name} is replaced by a checked identifier, because a utility statement takes no
-- parameters.
CREATE DATABASE "{name}"
