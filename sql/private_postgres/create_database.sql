-- {name} is replaced by a checked identifier: a utility statement takes no parameters.
CREATE DATABASE "{name}"
