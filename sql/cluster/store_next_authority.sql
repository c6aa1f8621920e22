-- Store the authority that replaces a stolen one, with its sealed key, and begin the first step; unless there is one.
UPDATE cluster
SET authority_rotation_certificate = $2,
    authority_rotation_key = $3,
    authority_rotation_step = 1,
    authority_rotation_since = clock_timestamp()
WHERE cluster_id = $1 AND authority_rotation = 'compromised' AND authority_rotation_certificate IS NULL
