-- Record how many machines of a provider's list its limit leaves out, and that limit; NULL if it leaves out none. Changes no row
-- if both are recorded already.
UPDATE provider_state
SET not_adopted = $2, machine_limit = $3,
    not_adopted_since = CASE WHEN $2::INT8 IS NULL THEN NULL
                             WHEN not_adopted IS NULL THEN clock_timestamp()
                             ELSE not_adopted_since END
WHERE provider = $1 AND (not_adopted IS DISTINCT FROM $2 OR machine_limit IS DISTINCT FROM $3)
