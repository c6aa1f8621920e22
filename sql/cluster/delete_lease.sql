-- Delete the named lease of a cluster that is deleted: nothing acquires it again.
DELETE FROM named_lease WHERE kind = $1 AND name = $2
