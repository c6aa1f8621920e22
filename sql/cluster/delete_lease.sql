-- Of a cluster that is gone: nobody takes it again.
DELETE FROM named_lease WHERE kind = $1 AND name = $2
