-- Check whether a provider is known: it was queried once, or has a machine.
SELECT EXISTS (SELECT 1 FROM provider_state WHERE provider = $1)
    OR EXISTS (SELECT 1 FROM machine_provided WHERE provider = $1) AS "exists!"
