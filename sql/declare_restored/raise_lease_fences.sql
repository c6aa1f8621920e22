UPDATE named_lease SET fence = fence + $1 RETURNING name
