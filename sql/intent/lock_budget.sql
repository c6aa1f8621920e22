SELECT name FROM named_lease WHERE kind = 'budget' AND name = $1 FOR UPDATE
