SELECT provider, kind, listed_at, machines, error, error_at, brake, brake_since
FROM provider_state ORDER BY provider
