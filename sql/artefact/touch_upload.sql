-- Renew the start time of an unfinished upload, so that one that is still in progress does not count as too
-- old.
UPDATE artefact SET begun_at = clock_timestamp() WHERE sha256 = $1 AND added_at IS NULL
