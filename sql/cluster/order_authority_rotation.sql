-- Order a replacement of a cluster's authority, in place of an order that is not carried out yet.
UPDATE cluster
SET authority_rotation = $2,
    authority_rotation_ordered_at = clock_timestamp(),
    authority_rotation_ordered_by = $3,
    authority_rotation_from = NULL,
    authority_rotation_key = NULL,
    authority_rotation_step = NULL,
    authority_rotation_certificate = NULL,
    authority_rotation_since = NULL,
    version = version + 1
WHERE cluster_id = $1
