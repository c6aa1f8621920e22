-- Why no machine is taken from a provider, if that is so.
SELECT brake FROM provider_state WHERE provider = $1
