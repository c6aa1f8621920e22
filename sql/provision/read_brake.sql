-- Read why no machine is taken from a provider, if a brake prevents that.
SELECT brake FROM provider_state WHERE provider = $1
