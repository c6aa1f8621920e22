UPDATE provider_state
SET brake = $2, brake_since = CASE WHEN brake IS NULL THEN clock_timestamp() ELSE brake_since END
WHERE provider = $1 AND brake IS DISTINCT FROM $2
