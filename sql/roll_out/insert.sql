INSERT INTO roll_out (roll_out_id, sha256, release, selector, parallelism, deadline_seconds, created_at, created_by, reason)
VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp(), $7, $8)
