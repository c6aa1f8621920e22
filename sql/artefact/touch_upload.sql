-- One that somebody still works on is not too old.
UPDATE artefact SET begun_at = clock_timestamp() WHERE sha256 = $1 AND added_at IS NULL
