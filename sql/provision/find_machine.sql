SELECT machine_id FROM machine_provided WHERE provider = $1 AND provider_id = $2
