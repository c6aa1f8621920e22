INSERT INTO machine_provided (machine_id, provider, provider_id, reservation, address, ssh_port, ssh_user,
    location, status, provided_at, looked_at, unchanged)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, clock_timestamp(), NULL, FALSE)
