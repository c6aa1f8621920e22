SELECT fence FROM named_lease
WHERE kind = $2 AND name = $3 AND lease_session = $1 AND fence = $4
FOR UPDATE
