UPDATE provider_state SET brake = NULL, brake_since = NULL WHERE provider = $1 AND brake IS NOT NULL
