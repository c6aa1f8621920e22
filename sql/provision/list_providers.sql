-- List what each provider answered last.
SELECT provider, kind, listed_at, machines, error, error_at, brake, brake_since, not_adopted, machine_limit,
       not_adopted_since
FROM provider_state
ORDER BY provider
