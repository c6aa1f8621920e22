INSERT INTO access_credential
    (credential_id, kind, name, role, providers, proof, created_at, created_by, expires_at)
SELECT $1, $2, $3, $4, $5, $6, clock_timestamp(), $7,
       clock_timestamp() + $8::INT8 * INTERVAL '1 millisecond'
ON CONFLICT (proof) DO NOTHING
RETURNING created_at, expires_at
