-- Stores a statement of a cluster ($2, of epoch $3 and number $4), unless one is stored that is not lower, or the cluster
-- has another authority ($5) than the one that it was verified by.
UPDATE cluster SET statement = $2, statement_epoch = $3, statement_number = $4
WHERE cluster_id = $1
  AND (statement IS NULL OR (statement_epoch, statement_number) < ($3, $4))
  AND (ca_certificate IS NULL OR ca_certificate = $5)
