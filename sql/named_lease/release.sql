UPDATE named_lease SET lease_session = NULL
WHERE kind = $2 AND name = $3 AND lease_session = $1 AND fence = $4
RETURNING name
